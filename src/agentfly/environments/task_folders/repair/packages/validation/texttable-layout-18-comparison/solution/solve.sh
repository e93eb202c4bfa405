#!/bin/bash
sed -i '18c\        if line and len(line) + 1 + len(word) > width:' /app/texttable/layout.py
