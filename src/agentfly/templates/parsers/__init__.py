"""Parsers of assistant turns, one module per syntax; `registry` has them by name."""
