"""What the inputs of linear layers look like on real text: ranges a channel, from the target's own forward.

Static activation scales and smoothing need them; dynamic schemes do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.errors import ConfigError, RequestError
from eaglejax.models import decoder
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.linear import embedding, grouped_linear, linear
from eaglejax.nn.visible import Seen
from eaglejax.pytree import leaf_paths, unflatten
from eaglejax.quant.schemes import INNER


def is_float(path: str) -> bool:
    """Whether a matrix of the parameter table is never quantised: a rounded rotation would be none, biases
    are added, and the gate of a shared expert has one column."""
    return path == "post_rotation" or path.endswith(("_bias", ".shared_gate"))


@dataclasses.dataclass(frozen=True)
class InputRange:
    """Least and greatest value that each channel of a layer's input took: ``low``, ``high`` f32 [I]."""

    low: np.ndarray
    high: np.ndarray

    @property
    def absmax(self) -> np.ndarray:
        """Largest magnitude of each channel, f32 [I]."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def divided(self, by: np.ndarray) -> InputRange:
        """The ranges of the input over ``by`` [I], which is positive."""
        return InputRange(self.low / by, self.high / by)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Input ranges by the weight's parameter path, over ``tokens`` tokens of ``prompts`` prompts."""

    inputs: Mapping[str, InputRange]
    prompts: int
    tokens: int

    def of(self, path: str, rows: int) -> InputRange:
        """The range of the input of ``path``; raises ConfigError where none of ``rows`` channels is known."""
        found = self.inputs.get(path)
        if found is None or found.low.shape != (rows,):
            what = "holds nothing" if found is None else f"holds {found.low.shape[0]} channels"
            raise ConfigError(
                f"the calibration {what} for {path} ({rows} input channels); calibrate the target that is "
                "quantised"
            )
        return found


def weight_paths(config: ModelConfig, params: Any) -> list[str]:
    """Paths of the matrices that the decoder multiplies or looks up, in tree order.

    A matrix inside a wrapper counts by its own path, ``layers.3.down.inner``.
    """
    table = leaf_paths(decoder.param_table(config))
    matrices = {path for path, info in table.items() if len(info.shape) > 1 and not is_float(path)}
    return [path for path in leaf_paths(params) if path.removesuffix(INNER) in matrices]


class _Watched:
    """A weight that notes the range of what it multiplies; it lives within one trace."""

    def __init__(self, weight: Any, note: Callable[[jax.Array], None]) -> None:
        self.weight, self.note = weight, note

    def matmul(self, x: jax.Array, *, transposed: bool) -> jax.Array:
        self.note(x)
        return linear(x, self.weight, transposed=transposed, dtype=jnp.float32)

    def grouped_matmul(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        self.note(x)
        return grouped_linear(x, self.weight, sizes)

    def take(self, ids: jax.Array) -> jax.Array:
        return embedding(self.weight, ids)


def calibrate(target: Target, prompts: Sequence[Sequence[int]], *, width: int = 128) -> Statistics:
    """Run token-id ``prompts`` through the target and keep the ranges of every linear layer's input.

    Prompts run one at a time, ``width`` tokens a forward over a cache of the longest one, so that the
    programs that compile do not depend on the prompts' number. Raises RequestError for a prompt that is
    empty, longer than the target's context or of unknown ids, ConfigError for none at all or a width below 1,
    and for a target that is quantised already.
    """
    if width < 1:
        raise ConfigError(f"width is {width}; a forward takes at least 1 token")
    if target.quantization is not None:
        raise ConfigError(
            f"{target.name} is quantised ({target.quantization}); calibrate the float weights it was made of"
        )
    texts = [np.asarray(list(prompt), np.int32) for prompt in prompts]
    if not texts:
        raise ConfigError("there are no prompts to calibrate with; give some, of the kind that will be asked")
    for n, text in enumerate(texts):
        check_prompt(n, text, target)
    width = min(width, max(map(len, texts)))
    chunks = -(-max(map(len, texts)) // width)
    empty = decoder.init_cache(target.config, 1, chunks * width, target.dtype)
    run = jax.jit(_ranges, static_argnums=1, donate_argnums=2)
    total: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for text in texts:
        cache = jax.tree.map(jnp.copy, empty)
        for start in range(0, len(text), width):
            part = text[start : start + width]
            found, cache = run(target.params, target.config, cache, *chunk(part, start, width))
            for path, (low, high) in jax.device_get(found).items():
                if path in total:
                    low, high = np.minimum(low, total[path][0]), np.maximum(high, total[path][1])
                total[path] = (low, high)
    broken = [path for path, range_ in total.items() if not np.isfinite(range_).all()]
    if broken:
        raise ConfigError(
            f"the inputs of {len(broken)} layers, {broken[0]} among them, are not finite on these prompts; "
            "nothing can be calibrated"
        )
    inputs = {path: InputRange(*range_) for path, range_ in total.items()}
    return Statistics(inputs, len(texts), sum(map(len, texts)))


def check_prompt(number: int, text: np.ndarray, target: Target) -> None:
    """Refuse a calibration prompt [T] int32 that the target cannot take (RequestError)."""
    if text.ndim != 1 or not 1 <= text.size <= target.context:
        raise RequestError(
            f"calibration prompt {number} has {text.size} tokens; the target takes 1 to {target.context}"
        )
    if text.min() < 0 or text.max() >= target.config.vocab_size:
        raise RequestError(
            f"calibration prompt {number} has ids from {text.min()} to {text.max()}; the target knows 0 to "
            f"{target.config.vocab_size - 1}"
        )


def chunk(part: np.ndarray, start: int, width: int) -> tuple[np.ndarray, np.ndarray, Seen]:
    """(tokens [1, N], positions [1, N], visible) of a chunk, filled up to ``width`` tokens.

    What fills it up repeats the last token: same id, position and sight. It computes what that token does,
    so that no range widens.
    """
    last = np.minimum(np.arange(width), len(part) - 1)
    visible = Seen(jnp.asarray(np.tril(np.ones((width, width), bool))[last][None]))
    return part[last][None], (start + last).astype(np.int32)[None], visible


def _ranges(
    params: Any, config: ModelConfig, cache: Any, tokens: jax.Array, positions: jax.Array, visible: Seen
) -> tuple[dict[str, tuple[jax.Array, jax.Array]], Any]:
    """(path -> (low, high) f32 [I], the cache with the chunk committed)."""
    found: dict[str, tuple[jax.Array, jax.Array]] = {}
    paths = set(weight_paths(config, params))

    def watch(path: str, weight: Any) -> Any:
        def note(x: jax.Array) -> None:
            rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
            found[path] = (rows.min(axis=0), rows.max(axis=0))

        return _Watched(weight, note) if path in paths else weight

    watched = unflatten(params, {path: watch(path, leaf) for path, leaf in leaf_paths(params).items()})
    out = decoder.forward(watched, config, tokens, positions, cache, visible)
    decoder.unembed(watched, config, out.hidden)
    committed = positions[:, -1] + 1
    return found, dataclasses.replace(out.cache, lengths=committed.astype(jnp.int32))
