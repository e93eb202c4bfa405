#!/bin/bash
sed -i '31c\        if start >= end:' /app/intervals/spans.py
