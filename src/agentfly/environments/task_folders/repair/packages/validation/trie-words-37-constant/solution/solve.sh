#!/bin/bash
sed -i '37c\    def remove(self, word, times=1):' /app/trie/words.py
