#!/bin/bash
sed -i '19c\        if hours < 0:' /app/planner/plan.py
