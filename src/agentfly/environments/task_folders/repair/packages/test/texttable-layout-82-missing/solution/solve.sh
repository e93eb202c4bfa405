#!/bin/bash
sed -i '82c\        out.append("-+-".join("-" * width for width in widths))' /app/texttable/layout.py
