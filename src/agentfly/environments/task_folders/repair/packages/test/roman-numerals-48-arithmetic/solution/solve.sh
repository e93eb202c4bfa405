#!/bin/bash
sed -i '48c\            total -= value' /app/roman/numerals.py
