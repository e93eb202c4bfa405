#!/bin/bash
sed -i '64c\        found = [prefix] if node.count > 0 else []' /app/trie/words.py
