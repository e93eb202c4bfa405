import unittest

from matrix import Matrix


class MatrixTest(unittest.TestCase):
    def test_products(self):
        self.assertEqual(Matrix([[1, 2], [3, 4]]).times(Matrix([[0, 1], [1, 0]])).rows(), [[2, 1], [4, 3]])

    def test_determinants(self):
        self.assertEqual(Matrix([[1, 2], [3, 4]]).determinant(), -2)

    def test_powers(self):
        self.assertEqual(Matrix([[1, 1], [1, 0]]).power(5).rows(), [[8, 5], [5, 3]])

    def test_rows_of_one_length(self):
        with self.assertRaises(ValueError):
            Matrix([[1], [1, 2]])
