#!/bin/bash
sed -i '82c\        elif length == best:' /app/roman/numerals.py
