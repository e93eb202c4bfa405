#!/bin/bash
sed -i '142c\            given.append(self.sum())' /app/calc/parser.py
