#!/bin/bash
sed -i '57c\        if len(cells) > len(self.header):' /app/texttable/layout.py
