#!/bin/bash
sed -i '90c\            worker = min(range(workers), key=lambda number: (max(free[number], ready), number))' /app/planner/plan.py
