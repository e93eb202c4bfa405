"""Tables of plain text."""

from texttable.layout import Table, wrap

__all__ = ["Table", "wrap"]
