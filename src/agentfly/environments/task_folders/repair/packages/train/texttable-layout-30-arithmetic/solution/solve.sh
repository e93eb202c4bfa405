#!/bin/bash
sed -i '30c\    missing = max(width - len(text), 0)' /app/texttable/layout.py
