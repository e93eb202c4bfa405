#!/bin/bash
sed -i '99c\        return sorted(self._rows, key=key, reverse=descending)' /app/texttable/layout.py
