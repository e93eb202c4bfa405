"""Supervised fine-tuning: demonstrations, and training on them. Importing `demonstrations` does not import torch."""
