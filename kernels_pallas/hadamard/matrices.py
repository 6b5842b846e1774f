"""Hadamard matrices for sizes 2^k * m, by the constructions of Sylvester and Paley.

Paley (J. Math. Phys. 12, 1933) gives order q + 1 for a prime power q = 3 mod 4, and 2(q + 1) for q = 1 mod 4;
from these and doubling come 12, 20, 28, 36, 44, 52, 60, 68, 76, ... (92, 116, 156, 172 and some more are not
among them).
"""

import functools
import itertools

import numpy as np

from kernels_pallas.errors import KernelError


@functools.cache
def factor(size: int) -> tuple[int, int]:
    """(m, 2^k) with m * 2^k == size and m the smallest order with a known matrix here (1 for powers of two).

    Raises:
      KernelError: no such m; names the nearest larger size that has one.
    """
    found = _factor(size)
    if found is None:
        larger = next(n for n in itertools.count(size + 1) if _factor(n) is not None)
        raise KernelError(
            f"hadamard: no matrix of order {size} is known here; the next larger order is {larger}"
        )
    return found


def _factor(size: int) -> tuple[int, int] | None:
    if size < 1:
        return None
    odd = size
    while odd % 2 == 0:
        odd //= 2
    base = odd
    while size % base == 0:
        if base == 1 or _paley_field(base) is not None:
            return base, size // base
        base *= 2
    return None


@functools.cache
def hadamard_matrix(size: int) -> np.ndarray:
    """int8 [size, size] matrix H of +-1 with H @ H.T == size * I: Kronecker product of a base and a Sylvester
    matrix.

    Raises:
      KernelError: no matrix of this order is known here.
    """
    base, power = factor(size)
    matrix = np.ones((1, 1), np.int8) if base == 1 else _paley(base)
    sylvester = np.ones((1, 1), np.int8)
    while sylvester.shape[0] < power:
        sylvester = np.block([[sylvester, sylvester], [sylvester, -sylvester]])
    matrix = np.kron(matrix, sylvester).astype(np.int8)
    matrix.flags.writeable = False
    return matrix


def _paley_field(order: int) -> tuple[int, int] | None:
    """(prime, exponent) of the field whose quadratic residues give this order, or None."""
    for q, remainder in ((order - 1, 3), (order // 2 - 1, 1)):
        if order % 4 == 0 and q > 2 and q % 4 == remainder:
            prime = next(p for p in range(2, q + 1) if q % p == 0)
            exponent = round(np.log(q) / np.log(prime))
            if prime**exponent == q:
                return prime, exponent
    return None


def _paley(order: int) -> np.ndarray:
    field = _paley_field(order)
    assert field is not None
    q = field[0] ** field[1]
    character = _quadratic_characters(*field)
    if q % 4 == 3:
        skew = np.zeros((order, order), np.int8)
        skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, character
        return skew + np.eye(order, dtype=np.int8)
    symmetric = np.zeros((q + 1, q + 1), np.int8)
    symmetric[0, 1:], symmetric[1:, 0], symmetric[1:, 1:] = 1, 1, character
    identity = np.eye(q + 1, dtype=np.int8)
    return np.kron(symmetric, np.array([[1, 1], [1, -1]])) + np.kron(identity, np.array([[1, -1], [-1, -1]]))


def _quadratic_characters(prime: int, exponent: int) -> np.ndarray:
    """int8 [q, q]: entry (a, b) is 1, -1 or 0 as a - b is a square, a non-square or zero in GF(q)."""
    elements = np.array(list(itertools.product(range(prime), repeat=exponent)))  # coefficients, lowest first
    modulus = _irreducible(prime, exponent)
    place = prime ** np.arange(exponent - 1, -1, -1)
    square = np.zeros(len(elements), np.int8) - 1
    for element in elements[1:]:
        square[_multiply(element, element, modulus, prime) @ place] = 1
    square[0] = 0
    differences = (elements[:, None] - elements[None]) % prime
    return square[differences @ place]


def _multiply(a: np.ndarray, b: np.ndarray, modulus: np.ndarray, prime: int) -> np.ndarray:
    """Product of polynomials over GF(prime) modulo the monic modulus; coefficients lowest first."""
    product = np.convolve(a, b)
    degree = len(modulus) - 1
    for top in range(len(product) - 1, degree - 1, -1):
        product[top - degree : top + 1] -= product[top] * modulus
        product %= prime
    return product[:degree] % prime


def _irreducible(prime: int, degree: int) -> np.ndarray:
    """A monic irreducible polynomial over GF(prime), lowest coefficient first."""
    if degree == 1:
        return np.array([0, 1])
    monic = {n: list(itertools.product(range(prime), repeat=n)) for n in range(1, degree)}
    reducible = {
        tuple(np.convolve([*a, 1], [*b, 1]) % prime)
        for n in range(1, degree // 2 + 1)
        for a in monic[n]
        for b in monic[degree - n]
    }
    candidates = ((*c, 1) for c in itertools.product(range(prime), repeat=degree))
    return np.array(next(c for c in candidates if c not in reducible))
