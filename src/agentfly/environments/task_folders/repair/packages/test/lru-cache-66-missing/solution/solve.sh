#!/bin/bash
sed -i '66c\        self._drop(key)' /app/lru/cache.py
