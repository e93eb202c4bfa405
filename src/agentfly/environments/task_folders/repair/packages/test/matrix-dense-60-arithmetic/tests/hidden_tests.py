from itertools import permutations
from random import Random

from matrix import Matrix


def drawn(seed, height, width):
    random = Random(seed)
    return [[random.randrange(-5, 6) for _ in range(width)] for _ in range(height)]


def refused(function, *given):
    try:
        function(*given)
    except ValueError:
        return True
    return False


def by_permutations(rows):
    total = 0
    for order in permutations(range(len(rows))):
        term = 1
        for row, column in enumerate(order):
            term *= rows[row][column]
        swaps = sum(order[a] > order[b] for b in range(len(order)) for a in range(b))
        total += term if swaps % 2 == 0 else -term
    return total


def test_rows_and_shape():
    assert Matrix([[1, 2, 3], [4, 5, 6]]).rows() == [[1, 2, 3], [4, 5, 6]]
    assert Matrix([[1, 2, 3], [4, 5, 6]]).shape() == (2, 3)


def test_nothing_is_no_matrix():
    assert refused(Matrix, [])
    assert refused(Matrix, [[]])


def test_uneven_rows_are_refused():
    assert refused(Matrix, [[1, 2], [3]])
    assert refused(Matrix, [[1], [3, 4]])


def test_identity():
    assert Matrix.identity(3).rows() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_what_comes_out_can_be_changed():
    matrix = Matrix([[1]])
    matrix.rows()[0][0] = 5
    assert matrix.rows() == [[1]]


def test_transposed():
    assert Matrix([[1, 2, 3], [4, 5, 6]]).transposed().rows() == [[1, 4], [2, 5], [3, 6]]


def test_sums():
    assert Matrix([[1, 2], [3, 4]]).plus(Matrix([[10, 20], [30, 40]])).rows() == [[11, 22], [33, 44]]


def test_differences():
    assert Matrix([[5, 7]]).plus(Matrix([[1, 2]]), -2).rows() == [[3, 3]]


def test_sums_of_other_shapes_are_refused():
    assert refused(Matrix([[1, 2]]).plus, Matrix([[1], [2]]))


def test_products_of_any_shape():
    for seed in range(5):
        a, b = drawn(seed, 2, 3), drawn(seed + 50, 3, 4)
        wanted = [[sum(a[i][k] * b[k][j] for k in range(3)) for j in range(4)] for i in range(2)]
        assert Matrix(a).times(Matrix(b)).rows() == wanted


def test_products_that_do_not_fit_are_refused():
    assert refused(Matrix([[1, 2]]).times, Matrix([[1, 2]]))


def test_powers():
    matrix = Matrix([[2, 1], [0, 3]])
    assert matrix.power(1).rows() == [[2, 1], [0, 3]]
    assert matrix.power(4).rows() == matrix.times(matrix).times(matrix).times(matrix).rows()


def test_the_power_of_nothing():
    assert Matrix([[7, 2], [1, 3]]).power(0).rows() == [[1, 0], [0, 1]]


def test_odd_powers_are_refused():
    assert refused(Matrix([[1, 2]]).power, 2)
    assert refused(Matrix([[1]]).power, -1)


def test_minors():
    assert Matrix([[1, 2, 3], [4, 5, 6], [7, 8, 9]]).minor(1, 0).rows() == [[2, 3], [8, 9]]


def test_small_determinants():
    assert Matrix([[7]]).determinant() == 7
    assert Matrix([[3, 1], [2, 5]]).determinant() == 13


def test_larger_determinants():
    for size in (3, 4):
        assert Matrix(drawn(size, size, size)).determinant() == by_permutations(drawn(size, size, size))


def test_determinants_of_others_are_refused():
    assert refused(Matrix([[1, 2]]).determinant)


def test_trace():
    assert Matrix([[1, 2], [3, 4]]).trace() == 5
    assert Matrix([[1, 2, 9], [3, 4, 9]]).trace() == 5


def test_turned():
    assert Matrix([[1, 2, 3], [4, 5, 6]]).turned().rows() == [[4, 1], [5, 2], [6, 3]]


def test_symmetry():
    assert Matrix([[1, 2, 3], [2, 5, 6], [3, 6, 9]]).is_symmetric()
    assert not Matrix([[1, 2], [3, 1]]).is_symmetric()
    assert not Matrix([[1, 2, 3], [2, 5, 6], [4, 6, 9]]).is_symmetric()


def test_only_squares_are_symmetric():
    assert not Matrix([[1, 1]]).is_symmetric()
