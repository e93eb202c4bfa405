#!/bin/bash
sed -i '12c\    "abs": (1, 1, abs),' /app/calc/parser.py
