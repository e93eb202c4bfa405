#!/bin/bash
sed -i '85c\        if workers < 1:' /app/planner/plan.py
