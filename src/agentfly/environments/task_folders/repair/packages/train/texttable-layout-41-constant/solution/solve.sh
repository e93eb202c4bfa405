#!/bin/bash
sed -i '41c\    digits = text.strip().lstrip("+-").replace(".", "", 1)' /app/texttable/layout.py
