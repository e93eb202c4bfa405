#!/bin/bash
sed -i '97c\            return (0, float(cell), "") if is_number(cell) else (1, 0.0, cell)' /app/texttable/layout.py
