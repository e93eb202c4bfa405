"""Roman numerals, both ways."""

from roman.numerals import NumeralError, add, from_roman, is_roman, shortest, to_roman

__all__ = ["NumeralError", "add", "from_roman", "is_roman", "shortest", "to_roman"]
