#!/bin/bash
sed -i '41c\    if not letters or any(letter not in VALUES for letter in letters):' /app/roman/numerals.py
