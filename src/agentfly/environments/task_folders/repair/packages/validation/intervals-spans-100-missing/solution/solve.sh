#!/bin/bash
sed -i '100c\                break' /app/intervals/spans.py
