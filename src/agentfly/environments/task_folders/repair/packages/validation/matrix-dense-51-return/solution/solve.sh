#!/bin/bash
sed -i '51c\        return Matrix(product)' /app/matrix/dense.py
