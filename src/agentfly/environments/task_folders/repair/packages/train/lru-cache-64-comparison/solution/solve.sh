#!/bin/bash
sed -i '64c\        if key not in self._entries:' /app/lru/cache.py
