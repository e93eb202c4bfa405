#!/bin/bash
sed -i '42c\        if inner != other.shape()[0]:' /app/matrix/dense.py
