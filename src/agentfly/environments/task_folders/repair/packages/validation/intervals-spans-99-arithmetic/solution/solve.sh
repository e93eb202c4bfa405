#!/bin/bash
sed -i '99c\            if start - at >= size:' /app/intervals/spans.py
