#!/bin/bash
sed -i '25c\        return len(self._rows), len(self._rows[0])' /app/matrix/dense.py
