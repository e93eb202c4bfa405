#!/bin/bash
sed -i '80c\                left += self._after[other]' /app/planner/plan.py
