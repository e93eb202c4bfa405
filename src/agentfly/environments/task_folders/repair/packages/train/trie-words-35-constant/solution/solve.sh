#!/bin/bash
sed -i '35c\        return node.count if node is not None and word else 0' /app/trie/words.py
