#!/bin/bash
sed -i '36c\    return text + " " * missing' /app/texttable/layout.py
