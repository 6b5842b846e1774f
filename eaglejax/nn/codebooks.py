"""Random rotations of a head's vectors, and the codebook for the coordinates that they give.

A coordinate of a uniformly random unit vector in d dimensions is cos(t) with t of density sin(t)^(d-2) on
[0, pi] (a Beta distribution, close to a Gaussian of variance 1/d). Rotating a key or value at random brings
its coordinates near that distribution, for which the least-squares codebook is known beforehand (TurboQuant,
arXiv:2504.19874). A full random rotation does so whatever the vector; small blocks (Clifford rotors in
RotorQuant, pairs of quaternions in IsoQuant, arXiv:2603.28430) cost far less arithmetic and mix only
neighbours, so that a channel that outweighs the rest stays in its block.
"""

from __future__ import annotations

import functools

import numpy as np

_GRID = 1 << 16
_MOST_ITERATIONS = 20_000


@functools.cache
def lloyd_max(dim: int, bits: int) -> np.ndarray:
    """The 2^bits levels, ascending f32, of least mean squared error for a coordinate of a random unit vector.

    Lloyd's iteration (1957; Max, 1960): each level becomes the mean of what is nearest to it. ``dim`` >= 2.
    """
    angles = np.linspace(0.0, np.pi, _GRID + 1)
    density = np.sin(angles) ** (dim - 2)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])]) * (np.pi / _GRID / 2)
    count = 1 << bits
    # Levels of equal mass to start from; an angle falls as the coordinate it stands for rises.
    levels = np.cos(np.interp((np.arange(count)[::-1] + 0.5) / count * mass[-1], mass, angles))
    for _ in range(_MOST_ITERATIONS):
        between = np.arccos((levels[1:] + levels[:-1]) / 2)
        edges = np.concatenate([[np.pi], between, [0.0]])
        weight = np.interp(edges, angles, mass)
        moment = np.sin(edges) ** (dim - 1) / (dim - 1)
        # The integral of cos(t) sin(t)^(dim-2) has this closed form, so only the mass is summed numerically.
        better = (moment[:-1] - moment[1:]) / (weight[:-1] - weight[1:])
        better = (better - better[::-1]) / 2
        moved = np.max(np.abs(better - levels))
        levels = better
        if moved < 1e-10:
            break
    return levels.astype(np.float32)


@functools.cache
def rotation_blocks(kind: str, dim: int, seed: int) -> tuple[np.ndarray, ...]:
    """A random rotation of ``dim`` coordinates as consecutive groups of equal blocks, each f32 [n, m, m].

    ``kind``: "turbo" (one block, uniform on SO(dim) up to a reflection), "iso" (blocks of four, x -> p x
    conj(q) for unit quaternions p and q) or "rotor" (blocks of three, x -> R x R~ for a rotor R of Cl(3,0),
    whose even part is the quaternions). What does not fill a block is turned by a smaller one: a rotor, a
    rotation of the plane, a sign.
    """
    rng = np.random.default_rng((seed, dim))
    if kind == "turbo":
        q, r = np.linalg.qr(rng.standard_normal((dim, dim)))
        return ((q * np.sign(np.diag(r)))[None].astype(np.float32),)
    size = {"rotor": 3, "iso": 4}[kind]
    sizes = [(dim // size, size)] + ([(1, dim % size)] if dim % size else [])
    return tuple(_random_blocks(rng, count, m).astype(np.float32) for count, m in sizes if count)


def _random_blocks(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """``count`` uniformly random rotations of ``size`` <= 4 dimensions (of one: signs), [n, size, size]."""
    if size == 4:
        return _left(_unit(rng, count)) @ _right(_unit(rng, count))
    if size == 3:
        rotor = _unit(rng, count)
        return (_left(rotor) @ _right(rotor))[:, 1:, 1:]
    if size == 2:
        turn = rng.uniform(0, 2 * np.pi, count)
        c, s = np.cos(turn), np.sin(turn)
        return np.stack([np.stack([c, -s], -1), np.stack([s, c], -1)], -2)
    return rng.choice([-1.0, 1.0], (count, 1, 1))


def _unit(rng: np.random.Generator, count: int) -> np.ndarray:
    x = rng.standard_normal((count, 4))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def _left(p: np.ndarray) -> np.ndarray:
    """Matrices of x -> p x for quaternions ``p`` [n, 4]."""
    w, x, y, z = p.T
    return np.stack([[w, -x, -y, -z], [x, w, -z, y], [y, z, w, -x], [z, -y, x, w]]).transpose(2, 0, 1)


def _right(q: np.ndarray) -> np.ndarray:
    """Matrices of x -> x conj(q) for quaternions ``q`` [n, 4]."""
    w, x, y, z = q.T
    return np.stack([[w, x, y, z], [-x, w, -z, y], [-y, z, w, -x], [-z, -y, x, w]]).transpose(2, 0, 1)
