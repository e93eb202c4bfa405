#!/bin/bash
sed -i '13c\    (9, "IX"),' /app/roman/numerals.py
