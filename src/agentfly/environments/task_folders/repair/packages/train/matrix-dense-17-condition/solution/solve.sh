#!/bin/bash
sed -i '17c\        return cls([[1 if row == column else 0 for column in range(size)] for row in range(size)])' /app/matrix/dense.py
