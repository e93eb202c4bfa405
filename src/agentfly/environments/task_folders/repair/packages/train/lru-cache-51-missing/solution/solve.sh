#!/bin/bash
sed -i '51c\        self.hits += 1' /app/lru/cache.py
