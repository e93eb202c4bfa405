#!/bin/bash
sed -i '32c\    def plus(self, other, times=1):' /app/matrix/dense.py
