#!/bin/bash
sed -i '77c\            return self._rows[0][0]' /app/matrix/dense.py
