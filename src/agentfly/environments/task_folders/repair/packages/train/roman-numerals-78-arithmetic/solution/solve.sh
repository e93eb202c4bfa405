#!/bin/bash
sed -i '78c\    for number in range(low, high + 1):' /app/roman/numerals.py
