#!/bin/bash
sed -i '46c\        following = VALUES[letters[place + 1]] if place + 1 < len(letters) else 0' /app/roman/numerals.py
