#!/bin/bash
sed -i '102c\        wrapped = [wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]' /app/texttable/layout.py
