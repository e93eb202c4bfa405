#!/bin/bash
sed -i '46c\            child.below -= taken' /app/trie/words.py
