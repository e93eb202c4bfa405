#!/bin/bash
sed -i '50c\            total += value' /app/roman/numerals.py
