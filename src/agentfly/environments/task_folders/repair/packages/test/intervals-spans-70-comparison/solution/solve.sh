#!/bin/bash
sed -i '70c\        while i < len(mine) and j < len(theirs):' /app/intervals/spans.py
