"""Random matrices in the blocks of GGUF files, with the file's own reading of them."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from kernels_pallas.block_matmul import FORMS

KINDS = [Kind[name] for name in FORMS]
_HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
}


def random_blocks(kind: Kind, rows: int, k: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes a row]: every bit at random, scales of any size that is one, subnormal ones among
    them."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, k // block, size), dtype=np.uint8)
    for at in _HALVES.get(kind.name, (0,)):
        scales = (rng.normal(size=raw.shape[:2]) * 10.0 ** rng.integers(-7, 1, raw.shape[:2])).astype(
            np.float16
        )
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)
