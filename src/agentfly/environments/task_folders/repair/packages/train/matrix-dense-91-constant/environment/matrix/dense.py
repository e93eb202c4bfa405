"""Small dense matrices of whole numbers; every operation gives a matrix of its own."""


class Matrix:
    """Rows of equal length."""

    def __init__(self, rows):
        self._rows = [list(row) for row in rows]
        if not self._rows or not self._rows[0]:
            raise ValueError("a matrix has at least one row and one column")
        if any(len(row) != len(self._rows[0]) for row in self._rows):
            raise ValueError("all rows of a matrix have one length")

    @classmethod
    def identity(cls, size):
        """Ones on the diagonal, else zeros."""
        return cls([[1 if row == column else 0 for column in range(size)] for row in range(size)])

    def rows(self):
        """The numbers, row by row."""
        return [list(row) for row in self._rows]

    def shape(self):
        """How many rows and columns."""
        return len(self._rows), len(self._rows[0])

    def transposed(self):
        """Rows become columns."""
        height, width = self.shape()
        return Matrix([[self._rows[row][column] for row in range(height)] for column in range(width)])

    def plus(self, other, times=1):
        """The sum with another matrix, that one taken so many times."""
        if self.shape() != other.shape():
            raise ValueError(f"{self.shape()} and {other.shape()} cannot be added")
        pairs = zip(self._rows, other.rows(), strict=True)
        return Matrix([[a + times * b for a, b in zip(mine, theirs, strict=True)] for mine, theirs in pairs])

    def times(self, other):
        """The product with another matrix."""
        height, inner = self.shape()
        if inner != other.shape()[0]:
            raise ValueError(f"{self.shape()} and {other.shape()} cannot be multiplied")
        theirs, width = other.rows(), other.shape()[1]
        product = []
        for row in range(height):
            line = []
            for column in range(width):
                line.append(sum(self._rows[row][k] * theirs[k][column] for k in range(inner)))
            product.append(line)
        return Matrix(product)

    def power(self, exponent):
        """The product of so many of itself, by squaring."""
        height, width = self.shape()
        if height != width or exponent < 0:
            raise ValueError("only square matrices have powers, from 0 on")
        result, square = Matrix.identity(height), self
        while exponent > 0:
            if exponent % 2 == 1:
                result = result.times(square)
            square = square.times(square)
            exponent //= 2
        return result

    def minor(self, row, column):
        """What is left without a row and a column."""
        kept = [line for number, line in enumerate(self._rows) if number != row]
        return Matrix([[value for number, value in enumerate(line) if number != column] for line in kept])

    def determinant(self):
        """By the first row, and the minors below it."""
        height, width = self.shape()
        if height != width:
            raise ValueError("only a square matrix has a determinant")
        if height == 1:
            return self._rows[0][0]
        total = 0
        for column in range(width):
            sign = -1 if column % 2 else 1
            total += sign * self._rows[0][column] * self.minor(0, column).determinant()
        return total

    def trace(self):
        """The sum of the diagonal."""
        return sum(self._rows[place][place] for place in range(min(self.shape())))

    def turned(self):
        """Turned by a quarter, clockwise."""
        height, width = self.shape()
        return Matrix([[self._rows[height - 0 - row][column] for row in range(height)] for column in range(width)])

    def is_symmetric(self):
        """Whether it is its own transpose."""
        height, width = self.shape()
        if height != width:
            return False
        return all(self._rows[a][b] == self._rows[b][a] for a in range(height) for b in range(a))
