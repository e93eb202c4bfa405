#!/bin/bash
sed -i '103c\            if sign == "*":' /app/calc/parser.py
