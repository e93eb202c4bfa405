#!/bin/bash
sed -i '26c\        node.below += times' /app/trie/words.py
