from roman import NumeralError, add, from_roman, is_roman, shortest, to_roman

DIGITS = ["", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"]


def written(number):
    tens = [each.translate(str.maketrans("IVX", "XLC")) for each in DIGITS]
    hundreds = [each.translate(str.maketrans("IVX", "CDM")) for each in DIGITS]
    return "M" * (number // 1000) + hundreds[number // 100 % 10] + tens[number // 10 % 10] + DIGITS[number % 10]


def refused(function, *given):
    try:
        function(*given)
    except NumeralError:
        return True
    return False


def test_small_numbers():
    assert [to_roman(number) for number in range(1, 10)] == DIGITS[1:]


def test_tens():
    assert [to_roman(number) for number in range(10, 100, 7)] == [written(n) for n in range(10, 100, 7)]


def test_hundreds():
    assert [to_roman(number) for number in range(100, 1000, 37)] == [written(n) for n in range(100, 1000, 37)]


def test_thousands():
    assert [to_roman(number) for number in range(1000, 4000, 211)] == [written(n) for n in range(1000, 4000, 211)]


def test_the_last_number():
    assert to_roman(3999) == "MMMCMXCIX"
    assert from_roman("MMMCMXCIX") == 3999


def test_nothing_is_too_small():
    assert refused(to_roman, 0)
    assert refused(to_roman, -5)


def test_too_large_is_refused():
    assert refused(to_roman, 4000)


def test_reading_small_numbers():
    assert [from_roman(each) for each in DIGITS[1:]] == list(range(1, 10))


def test_reading_large_numbers():
    assert all(from_roman(written(number)) == number for number in range(10, 4000, 173))


def test_small_letters_and_spaces():
    assert from_roman(" mcmxciv ") == 1994


def test_an_empty_text_is_refused():
    assert refused(from_roman, "")
    assert refused(from_roman, "   ")


def test_other_letters_are_refused():
    assert refused(from_roman, "MIA")


def test_odd_ways_of_writing_are_refused():
    assert all(refused(from_roman, each) for each in ("IIII", "VX", "IC", "LL", "XM", "MMMM"))


def test_asking_whether_it_is_one():
    assert is_roman("XLII")
    assert not is_roman("XLIIII")


def test_sums_of_two():
    assert add("XX", "XXII") == "XLII"


def test_sums_of_many_and_of_one():
    assert add("I", "I", "I", "I") == "IV"
    assert add("C") == "C"


def test_shortest_of_a_range():
    assert shortest(1, 10) == [1, 5, 10]
    assert shortest(16, 19) == [16, 19]


def test_shortest_of_one_number():
    assert shortest(88, 88) == [88]


def test_shortest_of_no_number_is_refused():
    assert refused(shortest, 6, 5)
