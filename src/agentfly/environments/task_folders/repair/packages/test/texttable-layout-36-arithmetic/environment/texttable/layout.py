"""Tables of plain text: columns as wide as they must be, words that wrap, numbers to the right."""


def wrap(text, width):
    """The lines of a text, none longer than the width unless a single word is; such a word is cut."""
    if width < 1:
        raise ValueError("a line is at least one character wide")
    lines, line = [], ""
    for word in text.split():
        while len(word) > width:
            if line:
                lines.append(line)
                line = ""
            lines.append(word[:width])
            word = word[width:]
        if not word:
            continue
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    if line or not lines:
        lines.append(line)
    return lines


def aligned(text, width, side):
    """A text filled up to a width: on the right, on the left, or on both sides."""
    missing = max(width - len(text), 0)
    if side == "right":
        return " " * missing + text
    if side == "center":
        left = missing // 2
        return " " * left + text + " " * (missing - left)
    return text + " " + missing


def is_number(text):
    """Whether a cell reads as a number."""
    digits = text.strip().lstrip("+-").replace(".", "", 1)
    return digits.isdigit()


class Table:
    """Rows under a header; a column's width may be limited."""

    def __init__(self, header, widest=20):
        if not header:
            raise ValueError("a table has at least one column")
        self.header = [str(title) for title in header]
        self.widest = widest
        self._rows = []

    def add(self, *cells):
        """One more row; what is missing at its end is empty."""
        if len(cells) > len(self.header):
            raise ValueError(f"{len(cells)} cells do not fit into {len(self.header)} columns")
        row = [str(cell) for cell in cells]
        self._rows.append(row + [""] * (len(self.header) - len(row)))

    def widths(self):
        """How wide each column is."""
        found = []
        for column in range(len(self.header)):
            longest = max(len(row[column]) for row in [self.header, *self._rows])
            found.append(max(1, min(longest, self.widest)))
        return found

    def sides(self):
        """To which side each column is aligned: to the right where all of its cells are numbers."""
        found = []
        for column in range(len(self.header)):
            cells = [row[column] for row in self._rows if row[column]]
            found.append("right" if cells and all(is_number(cell) for cell in cells) else "left")
        return found

    def lines(self):
        """The table, line by line."""
        widths, sides = self.widths(), self.sides()
        out = self._row(self.header, widths, ["center"] * len(widths))
        out.append("-+-".join("-" * width for width in widths))
        for row in self._rows:
            out += self._row(row, widths, sides)
        return out

    def text(self):
        """The table in one text."""
        return "\n".join(line.rstrip() for line in self.lines())

    def sorted_by(self, title, descending=False):
        """The rows in the order of a column, numbers as numbers and before words."""
        column = self.header.index(title)

        def key(row):
            cell = row[column]
            return (0, float(cell), "") if is_number(cell) else (1, 0.0, cell)

        return sorted(self._rows, key=key, reverse=descending)

    def _row(self, cells, widths, sides):
        wrapped = [wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
        out = []
        for number in range(max(len(lines) for lines in wrapped)):
            parts = []
            for lines, width, side in zip(wrapped, widths, sides, strict=True):
                parts.append(aligned(lines[number] if number < len(lines) else "", width, side))
            out.append(" | ".join(parts))
        return out
