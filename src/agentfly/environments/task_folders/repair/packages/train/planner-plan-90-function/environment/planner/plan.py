"""Jobs with a duration, each after others: their order, their earliest and latest times, and who does them."""


class PlanError(ValueError):
    """The plan cannot be carried out."""


class Plan:
    """Jobs by name."""

    def __init__(self):
        self._hours = {}
        self._after = {}

    def add(self, name, hours, after=()):
        """One more job, which begins when all the others it comes after have ended."""
        if name in self._hours:
            raise PlanError(f"{name} is planned already")
        if hours < 0:
            raise PlanError(f"{name} cannot take {hours} hours")
        self._hours[name] = hours
        self._after[name] = list(after)

    def order(self):
        """All jobs, each after those it waits for; among those that could come next, the first by the alphabet."""
        waiting = {name: set(after) for name, after in self._after.items()}
        for name, after in waiting.items():
            for other in after:
                if other not in self._hours:
                    raise PlanError(f"{name} waits for {other}, which is not planned")
        found = []
        while waiting:
            ready = sorted(name for name, after in waiting.items() if not after)
            if not ready:
                raise PlanError(f"{min(waiting)} waits for itself")
            first = ready[0]
            found.append(first)
            del waiting[first]
            for after in waiting.values():
                after.discard(first)
        return found

    def starts(self):
        """When each job can begin at the earliest."""
        begin = {}
        for name in self.order():
            ends = [begin[other] + self._hours[other] for other in self._after[name]]
            begin[name] = max(ends, default=0)
        return begin

    def hours(self):
        """How long all of it takes where nobody waits for a worker."""
        begin = self.starts()
        return max((begin[name] + self._hours[name] for name in begin), default=0)

    def slack(self):
        """How much later than at the earliest each job may begin without making all of it longer."""
        begin, total = self.starts(), self.hours()
        latest = {}
        for name in reversed(self.order()):
            followers = [other for other, after in self._after.items() if name in after]
            end = min((latest[other] for other in followers), default=total)
            latest[name] = end - self._hours[name]
        return {name: latest[name] - begin[name] for name in begin}

    def critical(self):
        """The jobs that cannot be late, in the order in which they begin."""
        begin, slack = self.starts(), self.slack()
        return sorted((name for name in begin if slack[name] == 0), key=lambda name: (begin[name], name))

    def needs(self, name):
        """All that must have been done before a job, in the order of the alphabet."""
        if name not in self._after:
            raise PlanError(f"{name} is not planned")
        found, left = set(), list(self._after[name])
        while left:
            other = left.pop()
            if other not in found:
                found.add(other)
                left += self._after[other]
        return sorted(found)

    def shared(self, workers):
        """Who does what when: (job, worker, start), as jobs come up in order and the first free worker takes each."""
        if workers < 1:
            raise PlanError("somebody has to do it")
        free, ends, found = [0] * workers, {}, []
        for name in self.order():
            ready = max((ends[other] for other in self._after[name]), default=0)
            worker = min(range(workers), key=lambda number: (min(free[number], ready), number))
            start = max(free[worker], ready)
            ends[name] = free[worker] = start + self._hours[name]
            found.append((name, worker, start))
        return found

    def busy(self, workers):
        """The hours that each of so many workers works."""
        hours = [0] * workers
        for name, worker, _ in self.shared(workers):
            hours[worker] += self._hours[name]
        return hours
