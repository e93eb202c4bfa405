from calc import CalcError, evaluate, tokens, variables


def refused(text, **values):
    try:
        evaluate(text, **values)
    except CalcError:
        return True
    return False


def test_tokens():
    assert tokens("2*(x_1 -30.5)^max(a,b)") == [
        "2", "*", "(", "x_1", "-", "30.5", ")", "^", "max", "(", "a", ",", "b", ")",
    ]  # fmt: skip


def test_spaces_do_not_matter():
    assert tokens("  a  +b ") == ["a", "+", "b"]
    assert tokens("") == []


def test_what_means_nothing_is_refused():
    assert refused("2 $ 3")
    assert refused("=")


def test_sums_go_from_left_to_right():
    assert evaluate("10 - 3 - 2") == 5
    assert evaluate("10 - 3 + 2") == 9


def test_products_go_from_left_to_right():
    assert evaluate("100 / 5 / 2") == 10
    assert evaluate("17 % 10 * 3") == 21


def test_products_before_sums():
    assert evaluate("2 + 3 * 4 - 6 / 2") == 11


def test_brackets():
    assert evaluate("(2 + 3) * (4 - 1)") == 15
    assert evaluate("((7))") == 7


def test_signs():
    assert evaluate("-3 + 5") == 2
    assert evaluate("--4") == 4
    assert evaluate("2 * -3") == -6


def test_powers_from_right_to_left():
    assert evaluate("2 ^ 2 ^ 3") == 256
    assert evaluate("3 * 2 ^ 2") == 12


def test_powers_and_signs():
    assert evaluate("-2 ^ 2") == -4
    assert evaluate("2 ^ -1") == 0.5


def test_numbers_with_a_point():
    assert evaluate("1.5 * 4") == 6.0
    assert isinstance(evaluate("3"), int)


def test_wrong_numbers_are_refused():
    assert refused("1.2.3")
    assert refused("3x")


def test_values_of_names():
    assert evaluate("a * b + _c", a=2, b=3, _c=4) == 10
    assert refused("a + 1", b=1)


def test_functions():
    assert evaluate("max(1, 7, 3) + min(4, 2)") == 9
    assert evaluate("abs(3 - 10)") == 7


def test_functions_with_too_many_values():
    assert refused("abs(1, 2)")
    assert evaluate("round(2.567, 2)") == 2.57
    assert refused("round(1, 2, 3)")


def test_functions_there_are_not():
    assert refused("sin(1)")
    assert refused("max")


def test_division_by_zero_is_refused():
    assert refused("4 / (2 - 2)")
    assert refused("4 % 0")
    assert evaluate("0 / 4") == 0


def test_brackets_must_close():
    assert refused("(1 + 2")
    assert refused("max(1, 2")
    assert refused("1 + 2)")


def test_values_must_be_there():
    assert refused("")
    assert refused("1 +")
    assert refused("* 2")
    assert refused("1 2")


def test_variables():
    assert variables("b * a + a ^ n") == ["a", "b", "n"]


def test_functions_and_numbers_are_no_variables():
    assert variables("max(2, x) + abs(_y)") == ["_y", "x"]
    assert variables("3 + 4") == []
