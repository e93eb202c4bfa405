#!/bin/bash
sed -i '35c\            if low < start:' /app/intervals/spans.py
