#!/bin/bash
sed -i '54c\        called = place + 1 < len(pieces) and pieces[place + 1] == "("' /app/calc/parser.py
