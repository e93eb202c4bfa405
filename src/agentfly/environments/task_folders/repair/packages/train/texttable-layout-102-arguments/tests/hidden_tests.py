from itertools import pairwise

from texttable import Table, wrap

TEXT = "the quick brown fox jumps over the lazy dog"


def filled(header, *rows, **more):
    table = Table(header, **more)
    for row in rows:
        table.add(*row)
    return table


def refused(function, *given):
    try:
        function(*given)
    except ValueError:
        return True
    return False


def test_no_line_is_too_long_and_no_word_is_lost():
    for width in range(5, 30):
        lines = wrap(TEXT, width)
        assert max(map(len, lines)) <= width
        assert " ".join(lines) == TEXT


def test_lines_are_as_full_as_they_can_be():
    for width in range(5, 30):
        lines = wrap(TEXT, width)
        assert all(len(a) + 1 + len(b.split()[0]) > width for a, b in pairwise(lines))


def test_a_line_that_just_fits():
    assert wrap("ab cd", 5) == ["ab cd"]
    assert wrap("ab cde", 5) == ["ab", "cde"]


def test_long_words_are_cut():
    assert wrap("abcdefgh", 3) == ["abc", "def", "gh"]
    assert wrap("abcdef", 3) == ["abc", "def"]


def test_a_long_word_after_others():
    assert wrap("a bcdefg h", 4) == ["a", "bcde", "fg h"]


def test_nothing_to_wrap():
    assert wrap("", 4) == [""]
    assert wrap("   ", 4) == [""]


def test_no_width():
    assert refused(wrap, "a", 0)
    assert wrap("ab", 1) == ["a", "b"]


def test_widths():
    table = filled(["a", "title"], ["abc", "x"], ["abcdef", ""])
    assert table.widths() == [6, 5]


def test_widths_are_limited():
    assert filled(["a", "b"], ["x" * 30, "y" * 4], widest=10).widths() == [10, 4]


def test_an_empty_column_has_a_width():
    assert filled(["", "b"], ["", "c"]).widths() == [1, 1]


def test_numbers_go_to_the_right():
    table = filled(["a", "b", "c"], [1, "x", ""], [-2.5, "3", ""])
    assert table.sides() == ["right", "left", "left"]


def test_signs_and_points():
    assert filled(["a", "b"], ["+3", "1.2.3"], [" -4.5 ", "7"]).sides() == ["right", "left"]


def test_empty_cells_do_not_count():
    assert filled(["a"], [""], [5]).sides() == ["right"]


def test_missing_cells_are_empty():
    table = filled(["a", "b"], ["x"], ["y", "z"])
    assert table.lines()[-2:] == ["x |  ", "y | z"]


def test_too_many_cells_are_refused():
    assert refused(Table(["a", "b"]).add, 1, 2, 3)


def test_no_columns_are_refused():
    assert refused(Table, [])


def test_the_line_below_the_header():
    assert filled(["abc", "de"]).lines() == ["abc | de", "----+---"]


def test_the_header_is_in_the_middle():
    table = filled(["ab", "x"], ["abcdefg", "abcd"])
    assert table.lines()[0] == "  ab    |  x  "


def test_cells_that_wrap():
    table = filled(["k", "words"], ["a", "one two three"], widest=7)
    assert table.lines()[2:] == ["a | one two", "  | three  "]


def test_numbers_in_a_table():
    assert filled(["n"], [5], [123]).lines() == [" n ", "---", "  5", "123"]


def test_the_text_has_no_spaces_at_the_end():
    assert filled(["name", "b"], ["x", "yy"], ["z", ""]).text() == "name | b\n-----+---\nx    | yy\nz    |"


def test_sorting_numbers():
    table = filled(["n", "w"], [10, "a"], [9, "b"], [-1, "c"])
    assert [row[1] for row in table.sorted_by("n")] == ["c", "b", "a"]
    assert [row[1] for row in table.sorted_by("n", descending=True)] == ["a", "b", "c"]


def test_sorting_words_after_numbers():
    table = filled(["w"], ["pear"], ["7"], ["fig"])
    assert table.sorted_by("w") == [["7"], ["fig"], ["pear"]]
