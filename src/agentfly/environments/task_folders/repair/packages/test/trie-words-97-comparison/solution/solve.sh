#!/bin/bash
sed -i '97c\            if node.count > 0:' /app/trie/words.py
