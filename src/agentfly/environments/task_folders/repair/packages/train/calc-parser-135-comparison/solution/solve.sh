#!/bin/bash
sed -i '135c\        if token not in self.values:' /app/calc/parser.py
