"""Reads and works out expressions such as `2 * (x - 3) ^ 2`, by recursive descent.

sum      = product (("+" | "-") product)*
product  = signed (("*" | "/" | "%") signed)*
signed   = "-" signed | power
power    = atom ("^" signed)?
atom     = number | name | name "(" sum ("," sum)* ")" | "(" sum ")"
"""

SIGNS = "+-*/%^(),"
FUNCTIONS = {
    "abs": (1, 1, abs),
    "max": (1, None, max),
    "min": (1, None, min),
    "round": (1, 2, round),
}


class CalcError(ValueError):
    """The text is no expression, or cannot be worked out."""


def tokens(text):
    """The pieces of a text: numbers, names and signs."""
    found, place = [], 0
    while place < len(text):
        letter = text[place]
        if letter.isspace():
            place += 1
        elif letter in SIGNS:
            found.append(letter)
            place += 1
        else:
            end = place
            while end < len(text) and (text[end].isalnum() or text[end] in "._"):
                end += 1
            if end == place:
                raise CalcError(f"{letter!r} means nothing")
            found.append(text[place:end])
            place = end
    return found


def is_name(token):
    """Whether a token is a name."""
    return token[0].isalpha() or token[0] == "_"


def variables(text):
    """The names in an expression that are no functions, in the order of the alphabet."""
    pieces = tokens(text)
    found = set()
    for place, token in enumerate(pieces):
        called = place + 1 < len(pieces) and pieces[place + 1] == "("
        if is_name(token) and not called:
            found.add(token)
    return sorted(found)


def evaluate(text, **values):
    """What an expression comes to, with values for its names."""
    return Parser(tokens(text), values).parse()


class Parser:
    """Works an expression out while it reads it."""

    def __init__(self, pieces, values):
        self.pieces = pieces
        self.values = values
        self.place = 0

    def parse(self):
        """The value of all of it."""
        value = self.sum()
        if self.place < len(self.pieces):
            raise CalcError(f"{self.pieces[self.place]!r} was not expected")
        return value

    def next(self):
        """The token that comes next; empty at the end."""
        return self.pieces[self.place] if self.place < len(self.pieces) else ""

    def take(self, *wanted):
        """Go past the next token if it is one of these; whether it was."""
        token = self.next()
        if token and token in wanted:
            self.place += 1
            return token
        return ""

    def sum(self):
        value = self.product()
        while sign := self.take("+", "-"):
            other = self.product()
            value = value + other if not (sign == "+") else value - other
        return value

    def product(self):
        value = self.signed()
        while sign := self.take("*", "/", "%"):
            other = self.signed()
            if sign == "*":
                value = value * other
                continue
            if other == 0:
                raise CalcError("division by zero")
            value = value / other if sign == "/" else value % other
        return value

    def signed(self):
        if self.take("-"):
            return -self.signed()
        return self.power()

    def power(self):
        base = self.atom()
        if self.take("^"):
            return base ** self.signed()
        return base

    def atom(self):
        if self.take("("):
            value = self.sum()
            self.close()
            return value
        token = self.next()
        if not token or token in SIGNS:
            raise CalcError(f"a value was expected, not {token or 'the end'}")
        self.place += 1
        if not is_name(token):
            return self.number(token)
        if self.take("("):
            return self.call(token)
        if token not in self.values:
            raise CalcError(f"{token} has no value")
        return self.values[token]

    def call(self, name):
        given = [self.sum()]
        while self.take(","):
            given.append(self.sum())
        self.close()
        if name not in FUNCTIONS:
            raise CalcError(f"there is no function {name}")
        fewest, most, function = FUNCTIONS[name]
        if len(given) < fewest or (most is not None and len(given) > most):
            raise CalcError(f"{name} does not take {len(given)} values")
        return function(*given)

    def close(self):
        if not self.take(")"):
            raise CalcError("a bracket is not closed")

    def number(self, token):
        try:
            return float(token) if "." in token else int(token)
        except ValueError:
            raise CalcError(f"{token!r} is no number") from None
