"""What rotation is for: outlier channels put into a target whose function they do not change.

    python -m experiments.quantization.outliers --answers answers.jsonl \\
        --suites humaneval.jsonl mt_bench.jsonl

A channel that is ``factor`` times larger where a weight reads it, and a weight that is as much smaller there,
compute the same; an activation with such channels leaves the others few of its 8 bits. The injections:

    norms    channels of both norms' weights of every layer; rows of what reads them
    values   columns of v; the rows of o that read them
    down     columns of up; rows of down
    all      these three
    stream   no factor: the residual stream turned to its principal axes, so that few channels hold most of it
    none     the target as it is

The factor is a power of two, so that nothing is rounded, and the float logits must be the same numbers; those
of ``stream``, where weights are multiplied by a matrix, must have the same distribution up to ``CLOSE``.
Variants and figures are those of ``experiments.quantization.acceptance``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.cli import show
from eaglejax.cli.run import run_command
from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.rotation.basis import Basis
from eaglejax.rotation.rotate import rotate_target
from eaglejax.train.features import target_features
from eaglejax.train.packing import assemble
from eaglejax.train.samples import Sample
from experiments.quantization import perplexity
from experiments.quantization.acceptance import Bench, Settings, told
from experiments.quantization.variants import Targets, Variant

INJECTIONS = ("none", "norms", "values", "down", "all", "stream")
VARIANTS = (
    "float",
    "w8a8",
    "w4a8-g32",
    "w8a8+r1",
    "w4a8-g32+r1",
    "w8a8+r1+r2+r4",
    "w4a8-g32+r1+r2+r4",
)
CLOSE = 0.02
"""Widest mean divergence, in nats a token, of float weights that were multiplied by a matrix and rounded."""


@dataclasses.dataclass(frozen=True)
class Outliers(Settings):
    """Put outlier channels into a target and measure what they cost, with and without rotation."""

    variants: tuple[str, ...] = VARIANTS
    """Targets to measure, see `experiments/quantization/variants.py`."""
    injections: tuple[str, ...] = INJECTIONS
    """What is put into the target before."""
    factor: int = 64
    """How much larger an outlier is; a power of two."""
    channels: int = 4
    """Outliers of each norm, of the values and of the input of each down projection."""
    seed: int = 0
    """Of which channels they are."""
    name: str = "outliers"
    """Of the result."""

    def run(self) -> int:
        """The command. Exit status 1 where a text is not plain decoding's."""
        variants = [Variant.parse(name) for name in self.variants]
        unknown = sorted(set(self.injections) - set(INJECTIONS))
        if unknown:
            raise ConfigError(f"injection {unknown[0]!r} is not known; they are {', '.join(INJECTIONS)}")
        bench = Bench.prepare(self)
        options = {"factor": self.factor, "channels": self.channels, "seed": self.seed}
        result = bench.result(self.name, "outliers", **options)
        for injection in self.injections:
            wanted = [
                (variant, part)
                for variant in variants
                for part in self.measure
                if not result.has(injection, variant.name, part)
            ]
            if not wanted:
                continue
            with show.status(f"putting in {injection}"):
                changed, turned = inject(bench, injection, **options)
                check_same(bench, changed, exact=turned is None)
            targets, made = Targets(changed), None
            for variant, part in wanted:
                if made is None or made[0] != variant:
                    made = (variant, in_basis(targets.make(variant), turned))
                found = bench.measure(part, made[1])
                result.put(found, injection, variant.name, part)
                show.print_note(f"{injection}, {variant.name}: {told(found)}")
        parts = [one.get("acceptance", {}) for found in result.figures.values() for one in found.values()]
        return 0 if all(part.get("identical_to_ar", True) for part in parts) else 1


def inject(
    bench: Bench, injection: str, *, factor: int, channels: int, seed: int
) -> tuple[Target, Basis | None]:
    """(the bench's target with outliers of one of ``INJECTIONS``, the basis that its stream was turned to or
    None).

    A target whose stream was turned says nothing of it, as one that was trained that way would not. Raises
    ConfigError for a factor that is no power of two and for a target with experts or sandwich norms.
    """
    if factor < 2 or factor & (factor - 1):
        raise ConfigError(f"factor is {factor}; it is a power of two, so that no weight is rounded")
    target, config = bench.target, bench.target.config
    plain = all(layer.moe is None and layer.mixer is None for layer in config.layers)
    if not plain or config.sandwich_norms or target.basis is not None:
        raise ConfigError(
            f"{target.name}: outliers are put into dense, unrotated targets without closing norms"
        )
    if injection == "none":
        return target, None
    if injection == "stream":
        turned = rotate_target(target, principal_axes(target, bench.texts, bench.settings.width), r2=False)
        return dataclasses.replace(turned, basis=None, rotation=None), turned.rotation
    rng = np.random.default_rng(seed)
    kinds = ("norms", "values", "down") if injection == "all" else (injection,)
    layers = []
    for layer in target.params["layers"]:
        for kind in kinds:
            layer = _CHANGES[kind](layer, config, factor, channels, rng)
        layers.append(layer)
    return dataclasses.replace(target, params=target.params | {"layers": layers}), None


def _scales(size: int, factor: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """f32 [size]: ``factor`` at ``count`` random places, else 1."""
    scales = np.ones(size, np.float32)
    scales[rng.choice(size, min(count, size), replace=False)] = factor
    return scales


def _times(weight: jax.Array, scales: np.ndarray) -> jax.Array:
    return (weight.astype(jnp.float32) * scales).astype(weight.dtype)


def _norms(layer: Any, config: ModelConfig, factor: int, count: int, rng: np.random.Generator) -> Any:
    out = dict(layer)
    offset = np.float32(1.0 if config.norm_offset else 0.0)
    for norm, readers in (("attn_norm", "qkv"), ("mlp_norm", ("gate", "up"))):
        scales = _scales(config.hidden_size, factor, count, rng)
        stored = _times(layer[norm].astype(jnp.float32) + offset, scales) - offset
        out[norm] = stored.astype(layer[norm].dtype)
        out |= {name: _times(layer[name], 1 / scales[:, None]) for name in readers}
    return out


def _values(layer: Any, config: ModelConfig, factor: int, count: int, rng: np.random.Generator) -> Any:
    scales = _scales(config.num_kv_heads * config.head_dim, factor, count, rng)
    shared = config.num_heads // config.num_kv_heads
    rows = np.repeat(scales.reshape(config.num_kv_heads, -1), shared, axis=0).reshape(-1, 1)
    out = dict(layer) | {"v": _times(layer["v"], scales), "o": _times(layer["o"], 1 / rows)}
    if "v_bias" in layer:
        out["v_bias"] = _times(layer["v_bias"], scales)
    return out


def _down(layer: Any, config: ModelConfig, factor: int, count: int, rng: np.random.Generator) -> Any:
    scales = _scales(config.intermediate_size, factor, count, rng)
    out = dict(layer)
    out |= {"up": _times(layer["up"], scales), "down": _times(layer["down"], 1 / scales[:, None])}
    if "up_bias" in layer:
        out["up_bias"] = _times(layer["up_bias"], scales)
    return out


_CHANGES = {"norms": _norms, "values": _values, "down": _down}


def principal_axes(target: Target, texts: Sequence[Sample], width: int) -> np.ndarray:
    """f64 [H, H], orthogonal: columns are the eigenvectors of the mean outer product of the normed stream at
    every block's input on ``texts`` (of at most ``width`` tokens), that of the largest eigenvalue first."""
    boundaries = tuple(range(target.config.num_layers))
    size = target.config.hidden_size
    total = np.zeros((size, size))
    for text in texts:
        batch = assemble([text], width)
        states = target_features(target.params, target.config, batch, boundaries).aux
        assert states is not None
        x = np.asarray(states[0, : len(text)].astype(jnp.float32), np.float64).reshape(-1, size)
        x /= np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + target.config.norm_eps)
        total += x.T @ x
    return np.linalg.eigh(total)[1][:, ::-1]


def in_basis(target: Target, turned: Basis | None) -> Target:
    """``target`` saying how its stream relates to the original's, so that a draft can be aligned to it:
    ``turned`` first, then its own rotation."""
    if turned is None:
        return target
    matrix = turned.matrix.astype(np.float64)
    if target.rotation is not None:
        matrix = matrix @ target.rotation.matrix.astype(np.float64)
    basis = Basis(matrix.astype(np.float32), turned.gamma)
    return dataclasses.replace(target, basis=basis.id, rotation=basis)


def check_same(bench: Bench, changed: Target, *, exact: bool) -> None:
    """Whether ``changed`` is the function that the target is: raises EaglejaxError where a float logit of the
    texts differs (``exact``), or where the distributions diverge by more than ``CLOSE``."""
    if changed is bench.target:
        return
    own = perplexity.score(changed, bench.texts, bench.settings.width)[1]
    if exact and not np.array_equal(own, bench.base):
        raise EaglejaxError(
            f"the outliers changed the target's logits, by up to {np.abs(own - bench.base).max():.3g}"
        )
    divergence = float(np.mean(np.sum(np.exp(bench.base) * (bench.base - own), axis=-1)))
    if divergence > CLOSE:
        raise EaglejaxError(
            f"turning the stream moved the target's distribution by {divergence:.3g} nats a token"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    return run_command(Outliers, argv)


if __name__ == "__main__":
    sys.exit(main())
