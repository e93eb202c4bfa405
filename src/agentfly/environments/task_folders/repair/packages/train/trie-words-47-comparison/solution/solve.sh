#!/bin/bash
sed -i '47c\            if child.below == 0:' /app/trie/words.py
