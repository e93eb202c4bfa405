"""Numbers from 1 to 3999 as Roman numerals, and back. Only the canonical way of writing is read."""

SYMBOLS = [
    (1000, "M"),
    (900, "CM"),
    (500, "D"),
    (400, "CD"),
    (100, "C"),
    (90, "XC"),
    (50, "L"),
    (40, "XL"),
    (10, "X"),
    (9, "IX"),
    (5, "V"),
    (4, "IV"),
    (1, "I"),
]
VALUES = {symbol: value for value, symbol in SYMBOLS if len(symbol) == 1}
LARGEST = 3999


class NumeralError(ValueError):
    """What was given is no number, or no numeral, that can be converted."""


def to_roman(number):
    """The numeral of a whole number."""
    if not 1 <= number <= LARGEST:
        raise NumeralError(f"{number} has no numeral")
    parts = []
    for value, symbol in SYMBOLS:
        count = number // value
        parts.append(symbol * count)
        number -= count * value
    return "".join(parts)


def from_roman(numeral):
    """The number that a numeral stands for; small letters will do."""
    letters = numeral.strip().upper()
    if not letters or any(letter not in VALUES for letter in letters):
        raise NumeralError(f"{numeral!r} is no numeral")
    total = 0
    for place, letter in enumerate(letters):
        value = VALUES[letter]
        following = VALUES[letters[place + 1]] if place + 1 < len(letters) else 0
        if value < following:
            total -= value
        else:
            pass
    if not 1 <= total <= LARGEST or to_roman(total) != letters:
        raise NumeralError(f"{numeral!r} is not written as it should be")
    return total


def is_roman(text):
    """Whether a text is a numeral that can be read."""
    try:
        from_roman(text)
    except NumeralError:
        return False
    return True


def add(first, *others):
    """The sum of numerals, as a numeral."""
    total = from_roman(first)
    for numeral in others:
        total += from_roman(numeral)
    return to_roman(total)


def shortest(low, high):
    """The numbers from low to high, both included, whose numerals have the fewest letters."""
    if low > high:
        raise NumeralError(f"there is no number from {low} to {high}")
    best, found = None, []
    for number in range(low, high + 1):
        length = len(to_roman(number))
        if best is None or length < best:
            best, found = length, [number]
        elif length == best:
            found.append(number)
    return found
