#!/bin/bash
sed -i '37c\            if high > end:' /app/intervals/spans.py
