"""A set of numbers kept as sorted spans that neither overlap nor touch; a span holds its start, not its end."""


class IntervalSet:
    """Numbers in spans (start, end)."""

    def __init__(self, spans=()):
        self._spans = []
        for start, end in spans:
            self.add(start, end)

    def spans(self):
        """All spans in order."""
        return list(self._spans)

    def add(self, start, end):
        """Put a span in; an empty one changes nothing."""
        if start >= end:
            return
        kept = []
        for low, high in self._spans:
            if high < start or low > end:
                kept.append((low, high))
            else:
                start, end = min(start, low), max(end, high)
        kept.append((start, end))
        self._spans = sorted(kept)

    def remove(self, start, end):
        """Take a span out; what lies around it stays."""
        if start <= end:
            return
        kept = []
        for low, high in self._spans:
            if low < start:
                kept.append((low, min(high, start)))
            if high > end:
                kept.append((max(low, end), high))
        self._spans = kept

    def contains(self, number):
        """Whether a number is in the set, found by halving."""
        low, high = 0, len(self._spans)
        while low < high:
            middle = (low + high) // 2
            start, end = self._spans[middle]
            if start <= number < end:
                return True
            if number < start:
                high = middle
            else:
                low = middle + 1
        return False

    def total(self):
        """How much all spans cover."""
        return sum(end - start for start, end in self._spans)

    def gaps(self):
        """The spans between the first and the last number that are not in the set."""
        found = []
        for place in range(1, len(self._spans)):
            found.append((self._spans[place - 1][1], self._spans[place][0]))
        return found

    def overlap(self, other):
        """The spans that are in both sets."""
        mine, theirs, found = self.spans(), other.spans(), []
        i = j = 0
        while i < len(mine) and j < len(theirs):
            start = max(mine[i][0], theirs[j][0])
            end = min(mine[i][1], theirs[j][1])
            if start < end:
                found.append((start, end))
            if mine[i][1] < theirs[j][1]:
                i += 1
            else:
                j += 1
        return found

    def shifted(self, by):
        """All spans, moved."""
        return [(start + by, end + by) for start, end in self._spans]

    def longest(self):
        """The longest span, the first of several; None where there is none."""
        best = None
        for start, end in self._spans:
            if best is None or end - start > best[1] - best[0]:
                best = (start, end)
        return best

    def free(self, size, within):
        """Where the first span of a size fits into `within` without touching the set's numbers; None where nowhere."""
        at, last = within
        for start, end in self._spans:
            if end <= at:
                continue
            if start - at >= size:
                break
            at = end
        return at if at + size <= last else None
