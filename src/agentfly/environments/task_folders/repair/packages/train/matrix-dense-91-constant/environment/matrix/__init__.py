"""Matrices of whole numbers."""

from matrix.dense import Matrix

__all__ = ["Matrix"]
