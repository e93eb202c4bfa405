#!/bin/bash
sed -i '52c\        self._entries[key] = self._entries.pop(key)' /app/lru/cache.py
