"""Evaluation of agents on held-out tasks."""
