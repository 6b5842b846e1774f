"""Rotating a target: the same function of its tokens, with activations that quantise better.

QuaRot (Ashkboos et al. 2024, arXiv:2404.00456) and SpinQuant (Liu et al. 2024, arXiv:2405.16406). With row
vectors, x the residual stream, n(x) = x / rms(x) and gamma a norm's weight::

    R1  x -> x Q          E' = E Q; what reads n(x): W' = Q^T diag(gamma) W, gamma := 1; what writes: W' = W Q
    R2  a head's values   v' = v R, o' = R^T o, d x d; cancels inside attention
    R3  queries and keys  both times the Hadamard matrix of order d behind RoPE, online; cancels in the scores
    R4  input of down     times the Hadamard matrix of order F, online; folded into down

n(x Q) = n(x) Q holds only without gamma between, hence the folding. A norm that *closes* a block (Gemma) has
its gamma behind it and then the sum: there the turn itself runs online, see ``ModelConfig.post_rotation``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.errors import ConfigError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.quant.online import HadamardInput
from eaglejax.rotation.basis import Basis, basis_id
from kernels_pallas import KernelError

Kind = Literal["hadamard", "random", "block", "identity"]


@dataclasses.dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix of order ``size``.

    ``kind``: ``hadamard``, the Hadamard matrix of that order behind random signs; ``random``, uniform over
    the orthogonal group (QR of a Gaussian, Mezzadri 2007); ``block``, Hadamard matrices of order ``block``
    along the diagonal behind random signs; ``identity``, nothing is turned and norms are folded alone.
    ``seed`` of signs and Gaussian. Raises ConfigError for a size without such a matrix and a seed
    below 0.
    """

    kind: Kind
    size: int
    seed: int = 0
    block: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("hadamard", "random", "block", "identity"):
            raise ConfigError(f"rotation {self.kind!r} is not known; use hadamard, random, block or identity")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"the seed of a rotation is {self.seed!r}; it is a whole number of 0 or more")
        if (self.kind == "block") != (self.block is not None):
            raise ConfigError("a block size goes with a block rotation, and a block rotation needs one")
        order = self.size
        if self.block is not None:
            order = self.block
            if order < 1 or self.size % order:
                raise ConfigError(f"blocks of {order} do not divide {self.size}")
        if self.kind in ("hadamard", "block"):
            _check_order(order)

    def matrix(self) -> np.ndarray:
        """f64 [size, size], every entry an f32 number: what the export holds is what was folded."""
        return _matrix(self)

    @property
    def basis_id(self) -> str:
        """Id of the matrix, see ``basis.basis_id``."""
        return basis_id(self.matrix())


@functools.lru_cache(maxsize=4)
def _matrix(rotation: Rotation) -> np.ndarray:
    rng = np.random.default_rng(rotation.seed)
    size = rotation.size
    if rotation.kind == "identity":
        matrix = np.eye(size)
    elif rotation.kind == "random":
        q, r = np.linalg.qr(rng.normal(size=(size, size)))
        matrix = q * np.sign(np.diag(r))
    else:
        # Importing Pallas takes a third of a second, which those who do not rotate are spared.
        from kernels_pallas.hadamard import hadamard_matrix

        order = rotation.block or size
        matrix = np.kron(np.eye(size // order), hadamard_matrix(order) / np.sqrt(order))
        matrix = rng.choice([-1.0, 1.0], size)[:, None] * matrix
    matrix = matrix.astype(np.float32).astype(np.float64)
    matrix.flags.writeable = False
    return matrix


def _check_order(order: int) -> None:
    from kernels_pallas.hadamard import factor

    try:
        factor(order)
    except KernelError as error:
        raise ConfigError(f"{error}; use a random or a block rotation") from error


def rotate_target(
    target: Target,
    rotation: Rotation | np.ndarray | None,
    *,
    r2: bool = True,
    r3: bool = False,
    r4: bool = False,
) -> Target:
    """``target`` with its weights rotated: the same logits, up to rounding.

    ``rotation``: R1, as a ``Rotation`` or as a matrix [H, H] that another tool made; None leaves the residual
    stream and the norms as they are. ``r2``: rotate each head's values (Hadamard, or random where the head
    size has no such matrix). ``r3``: rotate queries and keys online. ``r4``: rotate the input of every down
    projection online. Products are taken in f64 and rounded once, to the weights' dtype. A tied head is
    untied. ``Target.basis`` and ``Target.rotation`` say what was done, which drafts need to know.

    Raises ConfigError for a target that is rotated already, quantised (rotate first) or with a calibrated
    cache, a matrix that is no rotation or does not fit, and sizes without a Hadamard matrix.
    """
    config, params = target.config, target.params
    turned = any(isinstance(weight, HadamardInput) for weight in map(_down_of, params["layers"]))
    if target.basis is not None or config.qk_rotation or turned:
        what = f"basis {target.basis}" if target.basis else "R4" if turned else "R3"
        raise ConfigError(f"{target.name} is rotated already ({what}); rotate the original model")
    if target.cache_scales is not None:
        raise ConfigError(
            f"{target.name} has scales of an int8-static cache, found on keys and values as they are; leave "
            "them out, rotate, then calibrate again"
        )
    if target.quantization is not None:
        raise ConfigError(f"{target.name} is quantised ({target.quantization}): rotate first, then quantise")
    config.require_grouped("a rotation")
    if not config.pre_norm and rotation is not None:
        raise ConfigError(
            f"a {config.family} model has no norms before its layers, which a turned stream needs"
        )
    if config.attention_gate and r2:
        raise ConfigError(
            f"R2 turns each head's values, and a {config.family} model gates them one by one; leave R2 out"
        )
    mixtures = [config.layer(i).moe for i in range(config.num_layers)]
    for order, wanted in (
        (config.head_dim, r3),
        (config.intermediate_size, r4 and None in mixtures),
    ):
        if wanted:
            _check_order(order)
    for moe in {moe for moe in mixtures if moe is not None and r4}:
        _check_order(moe.intermediate_size)
    basis = None
    if rotation is not None:
        q = (
            rotation.matrix()
            if isinstance(rotation, Rotation)
            else np.asarray(rotation, np.float32).astype(np.float64)
        )
        if q.shape != (config.hidden_size,) * 2:
            raise ConfigError(f"a rotation of {q.shape} does not fit a hidden size of {config.hidden_size}")
        basis = Basis(q.astype(np.float32), norm_weight(params["norm"], config).astype(np.float32))
        config, params = _residual(config, params, q)
    if r2:
        params = params | {"layers": [_values(layer, config) for layer in params["layers"]]}
    if r4:
        params = params | {"layers": [_down(layer) for layer in params["layers"]]}
    return dataclasses.replace(
        target,
        config=dataclasses.replace(config, qk_rotation=r3),
        params=params,
        basis=None if basis is None else basis.id,
        rotation=basis,
    )


def norm_weight(weight: Any, config: ModelConfig) -> np.ndarray:
    """What a norm of a model of ``config`` multiplies by, f64 [H]."""
    return _wide(weight) + (1.0 if config.norm_offset else 0.0)


def _wide(weight: Any) -> np.ndarray:
    return np.asarray(weight).astype(np.float64)


_ROWS = 4096
"""Rows of a matrix that are multiplied at a time: an embedding in f64 would take gigabytes."""


def product(left: np.ndarray, right: np.ndarray, dtype: Any) -> jax.Array:
    """``left`` [..., k] times ``right`` [k, m] in f64, rounded once to ``dtype``."""
    rows = np.asarray(left).reshape(-1, left.shape[-1])
    out = np.empty((rows.shape[0], right.shape[-1]), np.dtype(dtype))
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS].astype(np.float64) @ right
        out[start : start + _ROWS] = part.astype(out.dtype)
    return jnp.asarray(out.reshape(*left.shape[:-1], right.shape[-1]))


def _residual(config: ModelConfig, params: Any, q: np.ndarray) -> tuple[ModelConfig, Any]:
    """R1: norms folded, the stream turned."""
    identity = np.array_equal(q, np.eye(len(q)))

    def reads(weight: jax.Array, gamma: np.ndarray) -> jax.Array:
        """Q^T diag(gamma) W of [H, O], or of each of [E, H, O]."""
        swapped = np.swapaxes(np.asarray(weight), -1, -2)
        return jnp.swapaxes(product(swapped, gamma[:, None] * q, weight.dtype), -1, -2)

    def writes(weight: jax.Array) -> jax.Array:
        return weight if identity else product(np.asarray(weight), q, weight.dtype)

    def plain(weight: jax.Array) -> jax.Array:
        """The weight of a norm that multiplies by one."""
        return jnp.full_like(weight, 0.0 if config.norm_offset else 1.0)

    def layer(old: Any) -> Any:
        new, before, between = (
            dict(old),
            norm_weight(old["attn_norm"], config),
            norm_weight(old["mlp_norm"], config),
        )
        new |= {"attn_norm": plain(old["attn_norm"]), "mlp_norm": plain(old["mlp_norm"])}
        new |= {name: reads(old[name], before) for name in ("q", "k", "v", "q_gate") if name in old}
        behind = ("gate", "up", "router", "shared_gate")
        new |= {name: reads(old[name], between) for name in behind if name in old}
        several = [name for name in ("experts", "shared") if name in old]
        for part in several:
            new[part] = old[part] | {name: reads(old[part][name], between) for name in ("gate", "up")}
        if config.sandwich_norms:
            return new  # each block's last norm has its gamma behind it: the turn follows online
        new["o"] = writes(old["o"])
        for part in several:
            new[part] |= {"down": writes(old[part]["down"])}
        if "down" in old:
            new["down"] = writes(old["down"])
        return new | {name: writes(old[name]) for name in ("o_bias", "down_bias") if name in old}

    head = params["embed"].T if config.tie_embeddings else params["head"]
    out = {
        "embed": writes(params["embed"]),
        "layers": [layer(old) for old in params["layers"]],
        "norm": plain(params["norm"]),
        "head": reads(head, norm_weight(params["norm"], config)),
    }
    online = config.sandwich_norms and not identity
    if online:
        out["post_rotation"] = jnp.asarray(q, jnp.float32)
    return dataclasses.replace(config, tie_embeddings=False, post_rotation=online), out


def _values(layer: Any, config: ModelConfig) -> Any:
    """R2 of one layer: v' = v R and o' = R^T o for every head."""
    d = config.head_dim
    r = _head_rotation(d)
    v, o = np.asarray(layer["v"]), np.asarray(layer["o"])
    new = dict(layer)
    new["v"] = product(v.reshape(v.shape[0], -1, d), r, v.dtype).reshape(v.shape)
    new["o"] = product(o.T.reshape(o.shape[1], -1, d), r, o.dtype).reshape(o.T.shape).T
    if "v_bias" in layer:
        bias = np.asarray(layer["v_bias"])
        new["v_bias"] = product(bias.reshape(-1, d), r, bias.dtype).reshape(bias.shape)
    return new


def _head_rotation(size: int) -> np.ndarray:
    try:
        return Rotation("hadamard", size).matrix()
    except ConfigError:
        return Rotation("random", size).matrix()


def _down_of(layer: Any) -> Any:
    """The down projection of a layer, or of its experts."""
    return layer.get("experts", layer)["down"]


def _down(layer: Any) -> Any:
    """R4 of one layer."""
    turned = {"down": _turned(_down_of(layer))}
    return layer | ({"experts": layer["experts"] | turned} if "experts" in layer else turned)


def _turned(weight: jax.Array) -> HadamardInput:
    """``H^T W`` of [F, H], or of each of [E, F, H], behind the online turn."""
    from kernels_pallas.hadamard.reference import stages

    major, minor = (m.astype(np.float64) for m in stages(weight.shape[-2], False))
    shape = weight.shape
    blocks = _wide(weight).reshape(-1, major.shape[0], minor.shape[0], shape[-1])
    turned = np.einsum(
        "ac,nabo->ncbo", major, np.einsum("bd,nabo->nado", minor, blocks, optimize=True), optimize=True
    )
    return HadamardInput(jnp.asarray((turned.reshape(shape) * shape[-2] ** -0.5).astype(weight.dtype)))
