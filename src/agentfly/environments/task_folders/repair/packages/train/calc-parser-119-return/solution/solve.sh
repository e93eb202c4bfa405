#!/bin/bash
sed -i '119c\            return base ** self.signed()' /app/calc/parser.py
