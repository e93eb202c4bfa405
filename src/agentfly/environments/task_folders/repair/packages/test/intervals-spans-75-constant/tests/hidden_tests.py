from random import Random

from intervals import IntervalSet


def numbers_in(spans):
    return {number for start, end in spans for number in range(start, end)}


def drawn(seed):
    random = Random(seed)
    starts = [random.randrange(30) for _ in range(random.randrange(1, 6))]
    return [(start, start + random.randrange(1, 6)) for start in starts]


def test_adding_in_any_order():
    assert IntervalSet([(7, 9), (1, 2), (4, 5)]).spans() == [(1, 2), (4, 5), (7, 9)]


def test_overlapping_spans_become_one():
    assert IntervalSet([(1, 4), (2, 8), (7, 9)]).spans() == [(1, 9)]


def test_touching_spans_become_one_from_either_side():
    assert IntervalSet([(5, 8), (2, 5)]).spans() == [(2, 8)]
    assert IntervalSet([(2, 5), (5, 8)]).spans() == [(2, 8)]


def test_a_span_inside_another():
    assert IntervalSet([(0, 10), (3, 4)]).spans() == [(0, 10)]


def test_empty_spans_change_nothing():
    numbers = IntervalSet([(3, 3), (5, 2)])
    assert numbers.spans() == []
    numbers.add(1, 2)
    numbers.remove(4, 4)
    assert numbers.spans() == [(1, 2)]


def test_adding_agrees_with_plain_sets():
    for seed in range(40):
        assert numbers_in(IntervalSet(drawn(seed)).spans()) == numbers_in(drawn(seed))


def test_removing_the_middle_and_the_ends():
    numbers = IntervalSet([(0, 20)])
    numbers.remove(8, 12)
    numbers.remove(-5, 2)
    numbers.remove(18, 30)
    assert numbers.spans() == [(2, 8), (12, 18)]


def test_removing_everything():
    numbers = IntervalSet([(2, 4), (6, 7)])
    numbers.remove(2, 7)
    assert numbers.spans() == []


def test_removing_agrees_with_plain_sets():
    for seed in range(40):
        numbers = IntervalSet(drawn(seed))
        for start, end in drawn(seed + 100):
            numbers.remove(start, end)
        assert numbers_in(numbers.spans()) == numbers_in(drawn(seed)) - numbers_in(drawn(seed + 100))


def test_containing_at_the_edges():
    numbers = IntervalSet([(0, 3), (5, 8), (10, 11)])
    assert [number for number in range(-2, 14) if numbers.contains(number)] == [0, 1, 2, 5, 6, 7, 10]


def test_an_empty_set():
    empty = IntervalSet()
    assert not empty.contains(0)
    assert empty.total() == 0
    assert empty.gaps() == []
    assert empty.longest() is None


def test_total():
    assert IntervalSet([(1, 4), (10, 15)]).total() == 8


def test_gaps():
    assert IntervalSet([(0, 2), (5, 6), (9, 10)]).gaps() == [(2, 5), (6, 9)]


def test_overlap():
    first, second = IntervalSet([(0, 5), (8, 12)]), IntervalSet([(3, 9), (11, 20)])
    assert first.overlap(second) == [(3, 5), (8, 9), (11, 12)]


def test_overlap_of_neighbours_is_empty():
    assert IntervalSet([(0, 3)]).overlap(IntervalSet([(3, 6)])) == []


def test_overlap_with_the_same_ends():
    assert IntervalSet([(0, 3), (5, 7)]).overlap(IntervalSet([(1, 3), (6, 7)])) == [(1, 3), (6, 7)]


def test_shifted():
    assert IntervalSet([(1, 2), (4, 6)]).shifted(-3) == [(-2, -1), (1, 3)]


def test_the_first_of_the_longest():
    assert IntervalSet([(0, 2), (4, 7), (9, 12)]).longest() == (4, 7)


def test_free_before_between_and_after():
    numbers = IntervalSet([(3, 5), (8, 9)])
    assert numbers.free(3, (0, 20)) == 0
    assert numbers.free(3, (1, 20)) == 5
    assert numbers.free(4, (1, 20)) == 9


def test_free_inside_a_span_and_nowhere():
    numbers = IntervalSet([(0, 4), (6, 8)])
    assert numbers.free(2, (1, 10)) == 4
    assert numbers.free(2, (7, 10)) == 8
    assert numbers.free(3, (0, 10)) is None
