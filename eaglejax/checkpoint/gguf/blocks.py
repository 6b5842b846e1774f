"""Blocks of GGUF tensors taken apart: integers, scales and least numbers, as ``kernels_pallas.block_matmul``
lays them out.

Layouts of the blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from kernels_pallas.block_matmul import FORMS, Fields, Form

_SUPER = 256
"""Numbers of a block of two levels."""


def form_of(kind: Kind) -> Form | None:
    """The form that holds exactly what tensors of this type hold, None where there is none."""
    return FORMS.get(kind.name)


def fields_of(kind: Kind, raw: np.ndarray) -> Fields:
    """Rows of blocks, uint8 [N, bytes a row] of a type that has a form, taken apart."""
    size = GGML_QUANT_SIZES[kind][1]
    blocks = raw.reshape(len(raw), -1, size)
    return _READERS[kind](blocks)


def _halves(part: np.ndarray) -> np.ndarray:
    """float16 [N, blocks] of uint8 [N, blocks, 2]."""
    return np.ascontiguousarray(part).view("<f2")[..., 0]


def _rows(numbers: np.ndarray) -> np.ndarray:
    """[N, K] of [N, blocks, ...]."""
    return numbers.reshape(len(numbers), -1)


def _parts(packed: np.ndarray, run: int, bits: int) -> np.ndarray:
    """uint8 [N, blocks, numbers]: runs of ``run`` bytes hold the first, second, ... ``bits`` bits of run
    after run of numbers."""
    bytes_ = packed.reshape(*packed.shape[:2], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((bytes_ >> shifts) & np.uint8((1 << bits) - 1)).reshape(*packed.shape[:2], -1)


def _bits_of_a_word(packed: np.ndarray) -> np.ndarray:
    """uint8 [N, blocks, 32] of the bits of uint8 [N, blocks, 4], the lowest first."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")


def _four(blocks: np.ndarray) -> Fields:
    return Fields(_rows(_parts(blocks[..., 2:], 16, 4)), _halves(blocks[..., :2]))


def _four_with_min(blocks: np.ndarray) -> Fields:
    return Fields(_rows(_parts(blocks[..., 4:], 16, 4)), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _five(blocks: np.ndarray) -> Fields:
    q = _parts(blocks[..., 6:], 16, 4) | _bits_of_a_word(blocks[..., 2:6]) << np.uint8(4)
    return Fields(_rows(q), _halves(blocks[..., :2]))


def _five_with_min(blocks: np.ndarray) -> Fields:
    q = _parts(blocks[..., 8:], 16, 4) | _bits_of_a_word(blocks[..., 4:8]) << np.uint8(4)
    return Fields(_rows(q), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _eight(blocks: np.ndarray) -> Fields:
    # Signed there, 128 larger here.
    return Fields(_rows(blocks[..., 2:] ^ np.uint8(128)), _halves(blocks[..., :2]))


def _two_k(blocks: np.ndarray) -> Fields:
    scales, qs = blocks[..., :16], blocks[..., 16:80]
    return Fields(
        _rows(_parts(qs, 32, 2)),
        _halves(blocks[..., 80:82]),
        _halves(blocks[..., 82:84]),
        _rows((scales & 15).view(np.int8)),
        _rows((scales >> 4).view(np.int8)),
    )


def _three_k(blocks: np.ndarray) -> Fields:
    mask, qs, scales = blocks[..., :32], blocks[..., 32:96], blocks[..., 96:108]
    low = np.concatenate([scales[..., :8] & 15, scales[..., :8] >> 4], axis=-1)
    high = _parts(scales[..., 8:], 4, 2)
    factor = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    q = _parts(qs, 32, 2) | _parts(mask, 32, 1) << np.uint8(2)
    return Fields(_rows(q), _halves(blocks[..., 108:110]), factor=_rows(factor))


def _factors(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 [N, blocks * 8] of scales and of least numbers, of the 12 bytes that hold both in 6 bits."""
    d, m, rest = scales[..., :4], scales[..., 4:8], scales[..., 8:]
    factor = np.concatenate([d & 63, (rest & 15) | (d >> 2 & 48)], axis=-1)
    least = np.concatenate([m & 63, (rest >> 4) | (m >> 2 & 48)], axis=-1)
    return _rows(factor.view(np.int8)), _rows(least.view(np.int8))


def _four_k(blocks: np.ndarray) -> Fields:
    q = _parts(blocks[..., 16:], 32, 4)
    return Fields(_rows(q), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]), *_factors(blocks[..., 4:16]))


def _five_k(blocks: np.ndarray) -> Fields:
    q = _parts(blocks[..., 48:], 32, 4) | _parts(blocks[..., 16:48], 32, 1) << np.uint8(4)
    return Fields(_rows(q), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]), *_factors(blocks[..., 4:16]))


def _six_k(blocks: np.ndarray) -> Fields:
    q = _parts(blocks[..., :128], 64, 4) | _parts(blocks[..., 128:192], 32, 2) << np.uint8(4)
    factor = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return Fields(_rows(q), _halves(blocks[..., 208:210]), factor=_rows(factor))


_READERS: dict[Kind, Callable[[np.ndarray], Fields]] = {
    Kind.Q4_0: _four,
    Kind.Q4_1: _four_with_min,
    Kind.Q5_0: _five,
    Kind.Q5_1: _five_with_min,
    Kind.Q8_0: _eight,
    Kind.IQ4_NL: _four,
    Kind.Q2_K: _two_k,
    Kind.Q3_K: _three_k,
    Kind.Q4_K: _four_k,
    Kind.Q5_K: _five_k,
    Kind.Q6_K: _six_k,
}
