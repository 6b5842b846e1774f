"""Weights that a folder keeps as narrow floats with scales, read as the floats that they stand for.

Two published forms: 8-bit floats whose blocks of rows and columns share a scale (``quant_method`` fp8, as
DeepSeek-V3 is published), and 4-bit floats in blocks of 32 with a power of two (mxfp4, OCP Microscaling
Formats 1.0, as gpt-oss is). What such a weight stands for is exact in float32, and with mxfp4 in bfloat16.
Activations are not narrowed, as some servers do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from eaglejax.errors import CheckpointError

FORMS = ("fp8", "mxfp4")
"""``quant_method``s that are read here."""

_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Store(Protocol):
    """Tensors under the names of ``*ForCausalLM``."""

    def names(self) -> Any: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype: ...

    def array(self, name: str) -> np.ndarray: ...

    def rows(self, name: str, start: int, stop: int) -> Any: ...

    def check_dtypes(self, names: Iterable[str]) -> None: ...


def as_floats(store: Store, description: Any, where: str) -> Store:
    """``store`` itself, or what its narrow tensors stand for, by the config's ``quantization_config``.

    Raises CheckpointError for a form without the scales that are known.
    """
    method = description.get("quant_method") if isinstance(description, Mapping) else None
    if method == "mxfp4":
        return _Microscaled(store, where)
    if method == "fp8":
        return _Blocked(store, description, where)
    return store


class _Scaled:
    """A store some of whose tensors have scales beside them; those are ``narrow`` [name]."""

    narrow: dict[str, str]

    def __init__(self, store: Store, where: str, hidden: Iterable[str]) -> None:
        self._store, self._where = store, where
        self._names = [n for n in store.names() if n not in set(hidden)]

    def names(self) -> Any:
        return [*self._names, *self.narrow]

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name in self.narrow else self._store.dtype(name)

    def check_dtypes(self, names: Iterable[str]) -> None:
        self._store.check_dtypes(name for name in names if name not in self.narrow)

    def array(self, name: str) -> np.ndarray:
        if name not in self.narrow:
            return self._store.array(name)
        shape = self.shape(name)
        return np.asarray(self.rows(name, 0, int(np.prod(shape[:-1])))).reshape(shape)

    def shape(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError

    def rows(self, name: str, start: int, stop: int) -> Any:
        raise NotImplementedError


class _Blocked(_Scaled):
    """8-bit floats [O, I] times f32 scales [ceil(O / b0), ceil(I / b1)] called ``<name>_scale_inv``."""

    def __init__(self, store: Store, description: Mapping[str, Any], where: str) -> None:
        block: Any = description.get("weight_block_size")
        pair = isinstance(block, list | tuple) and len(block) == 2
        if not pair or not all(type(b) is int and b > 0 for b in block):
            raise CheckpointError(
                f"{where}: weight_block_size of its fp8 weights is {block!r:.80}; known are two sizes, as "
                "[128, 128]"
            )
        self._block = tuple(block)
        self.narrow = {
            name.removesuffix(_SCALE): name for name in store.names() if name.endswith(f".weight{_SCALE}")
        }
        super().__init__(store, where, [*self.narrow, *self.narrow.values()])
        present = set(store.names())
        for name, scale in self.narrow.items():
            if name not in present:
                raise CheckpointError(f"{where} holds {scale} without {name}")
            stored = store.shape(name)
            want = tuple(-(-n // b) for n, b in zip(stored, self._block, strict=False))
            narrow = store.dtype(name) in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
            if not narrow or len(stored) != 2 or store.shape(scale) != want:
                raise CheckpointError(
                    f"{where}: {name} is {store.dtype(name).name} of {stored} with scales of "
                    f"{store.shape(scale)}; 8-bit floats in blocks of {self._block} have scales of {want}"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        return self._store.shape(name)

    def rows(self, name: str, start: int, stop: int) -> Any:
        rows = self._store.rows(name, start, stop)
        if name not in self.narrow:
            return rows
        scale = np.asarray(self._store.array(self.narrow[name]), np.float32)
        scale = scale[np.arange(start, stop) // self._block[0]]
        return rows.astype(np.float32) * np.repeat(scale, self._block[1], axis=1)[:, : rows.shape[1]]


class _Microscaled(_Scaled):
    """4-bit floats (E2M1), two a byte, the first one low, in ``<name>_blocks`` [..., O, I / 32, 16] u8 with
    the exponents of ``<name>_scales`` [..., O, I / 32] u8, offset by 127; read as [..., I, O]."""

    def __init__(self, store: Store, where: str) -> None:
        present = set(store.names())
        self.narrow = {n.removesuffix(_BLOCKS): n for n in present if n.endswith(_BLOCKS)}
        super().__init__(store, where, [*self.narrow.values(), *(n + _SCALES for n in self.narrow)])
        self._last: tuple[str, int, np.ndarray] | None = None
        for name, blocks in self.narrow.items():
            if name + _SCALES not in present:
                raise CheckpointError(f"{where} holds {blocks} without {name + _SCALES}")
            shape, scales = store.shape(blocks), store.shape(name + _SCALES)
            bytes_of = [store.dtype(n) == np.uint8 for n in (blocks, name + _SCALES)]
            if len(shape) < 3 or shape[-1] != 16 or scales != shape[:-1] or not all(bytes_of):
                raise CheckpointError(
                    f"{where}: {blocks} of {shape} with scales of {scales} are no bytes of 32 4-bit floats "
                    "a scale"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.narrow:
            return self._store.shape(name)
        *front, out, groups, _ = self._store.shape(self.narrow[name])
        return (*front, 32 * groups, out)

    def rows(self, name: str, start: int, stop: int) -> Any:
        if name not in self.narrow:
            return self._store.rows(name, start, stop)
        height = self.shape(name)[-2]
        first, last = start // height, (stop - 1) // height
        matrices = [self._matrix(name, number) for number in range(first, last + 1)]
        return np.concatenate(matrices)[start - first * height : stop - first * height]

    def _matrix(self, name: str, number: int) -> np.ndarray:
        """Matrix ``number`` of a stack, f32 [I, O]; the last one is kept, as rows are asked for in turn."""
        if self._last is None or self._last[:2] != (name, number):
            blocks = self._store.array(self.narrow[name])
            scales = self._store.array(name + _SCALES)
            blocks = blocks.reshape(-1, *blocks.shape[-3:])[number]
            exponents = scales.reshape(-1, *scales.shape[-2:])[number].astype(np.int32) - 127
            values = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1).reshape(*blocks.shape[:2], 32)
            self._last = (name, number, np.ldexp(values, exponents[..., None]).reshape(blocks.shape[0], -1).T)
        return self._last[2]
