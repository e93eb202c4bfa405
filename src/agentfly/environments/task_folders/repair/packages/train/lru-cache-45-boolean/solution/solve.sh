#!/bin/bash
sed -i '45c\        if entry is not None and self._is_old(entry, now):' /app/lru/cache.py
