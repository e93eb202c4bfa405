#!/bin/bash
sed -i '104c\        while len(node.children) == 1 and node.count == 0:' /app/trie/words.py
