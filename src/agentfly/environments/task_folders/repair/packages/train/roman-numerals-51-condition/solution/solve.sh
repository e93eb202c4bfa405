#!/bin/bash
sed -i '51c\    if not 1 <= total <= LARGEST or to_roman(total) != letters:' /app/roman/numerals.py
