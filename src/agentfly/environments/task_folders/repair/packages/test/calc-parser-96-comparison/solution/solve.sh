#!/bin/bash
sed -i '96c\            value = value + other if sign == "+" else value - other' /app/calc/parser.py
