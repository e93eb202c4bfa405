#!/bin/bash
sed -i '75c\            if mine[i][1] < theirs[j][1]:' /app/intervals/spans.py
