#!/bin/bash
sed -i '58c\        if entry is None or self._is_old(entry, now):' /app/lru/cache.py
