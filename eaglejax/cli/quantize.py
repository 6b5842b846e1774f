"""``eaglejax quantize``: a target with quantised weights, perhaps rotated before, written to a folder."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
import tyro

import eaglejax as ej
from eaglejax.api import encode_prompt
from eaglejax.checkpoint.hf import QuantizedForm
from eaglejax.checkpoint.quantized.own.marker import is_packed, packed_leaves
from eaglejax.checkpoint.quantized.parts import kind_of
from eaglejax.checkpoint.quantized.read import label
from eaglejax.checkpoint.quantized.write import check_form, check_output, write_quantized
from eaglejax.cli import show
from eaglejax.config import BadRow, read_prompts
from eaglejax.errors import ConfigError
from eaglejax.models import decoder, memory
from eaglejax.models.config import ModelConfig
from eaglejax.nn.visible import Causal
from eaglejax.quant.array import QuantArray
from eaglejax.quant.calibrate import calibrate
from eaglejax.quant.kv import calibrate_cache
from eaglejax.quant.quantize import quantize_target
from eaglejax.quant.schemes import DEFAULT_EXCLUDE, SCHEMES, Plan, get_scheme, scheme_name
from eaglejax.rotation.rotate import Rotation, rotate_target

Turn = Literal["hadamard", "random", "block"]
Truth = Annotated[bool | None, tyro.conf.FlagConversionOff]

CACHES = {"": None, "c8": "int8", "f8": "fp8"}
"""What a quant type may end in, and the cache format it asks for; calibrated, int8 becomes int8-static."""

PROBE = (
    "The error of a quantised layer is measured on a text, this one unless prompts are given. 3 * 7 = 21, "
    "and def area(r): return 3.14159 * r ** 2. Ein Satz auf Deutsch, une phrase en français."
)
"""The text on which layers are compared where no calibration prompts are given."""

TOO_LARGE = "take a smaller model, or a dtype of fewer bytes (--dtype)"

LONGEST, SAMPLES = 512, 64
"""Tokens of a calibration prompt that are used, and prompts of a file where no number is given."""


@dataclasses.dataclass(frozen=True)
class Quantize:
    """Quantise a target's weights and write a folder that loads by itself."""

    model_path: Annotated[str, tyro.conf.arg(aliases=["--target"])]
    """The model: `demo`, a folder, a .gguf file or a Hub id."""
    output_path: Annotated[Path, tyro.conf.arg(aliases=["--save-path", "--output"])]
    """New folder for the quantised model."""
    quant_type: str
    """w8a8, w8a8-static, w4a8, w4a16 or w8a16, in any case; with c8 (int8) or f8 (fp8) at its end for
    keys and values."""
    use_rot: Truth = None
    """True rotates the weights before (as --rotate hadamard does), False does not. Default: as --rotate."""
    rotate: Turn | None = None
    """Rotate the residual stream by a Hadamard matrix with random signs, a random orthogonal matrix, or
    Hadamard blocks. The matrix is written beside the weights: drafts need it."""
    rot_block_size: int | None = None
    """Order of the blocks of --rotate block."""
    online_rot: bool = False
    """Turn queries, keys and the input of down projections too, as the model runs (R3, R4)."""
    seed: Annotated[int | None, tyro.conf.arg(aliases=["--rot-seed"])] = None
    """Seed of the rotation. Default: 0."""
    group_size: int | None = None
    """Input channels that share a weight scale. Default: one scale an output channel."""
    exclude: tuple[str, ...] = ()
    """Globs of parameter paths that stay as they are, beside embed, head, routers and MTP layers."""
    calib_prompts: Annotated[str | None, tyro.conf.arg(aliases=["--calib-dataset"])] = None
    """A prompt file, for static activation scales, smoothing and cache scales."""
    calib_samples: int | None = None
    """Most prompts that are used of it. Default: 64."""
    search: Annotated[Literal["minmax", "mse"], tyro.conf.arg(aliases=["--weight-method"])] = "minmax"
    """How weight scales are found: by the largest weight, or by least squared error."""
    smooth: float | None = None
    """Move outlier channels of activations into weights, with this strength of 0 to 1."""
    asymmetric: bool = False
    """Static activations get an offset as well."""
    format: QuantizedForm = "eaglejax"
    """Layout of the folder: eaglejax holds everything, modelslim and compressed-tensors are known
    elsewhere."""
    dtype: str | None = None
    """bfloat16, float32 or float16, of what is not quantised. Default: bfloat16."""
    overwrite: bool = False
    """Replace the folder if it is there."""
    save_quantized: Truth = True
    """False: measure and report, write nothing."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def run(self) -> int:
        """The command."""
        plan, cache = self._plan()
        rotation = self._rotation_kind()
        if self.save_quantized:
            check_output(self.output_path, overwrite=self.overwrite)
        with show.status(f"loading {self.model_path}"):
            source = ej.load_target(self.model_path, dtype=self.dtype)
            # How keys and values are held is this command's to say, and scales belong to the weights as read.
            source = dataclasses.replace(source, cache_format=None, cache_scales=None)
        prompts = self._prompts(source)
        original = source.nbytes
        if rotation is not None or self.online_rot:
            memory.require_free("a rotated copy of the weights", source.nbytes, TOO_LARGE)
            with show.status("rotating"):
                source = self._rotated(source, rotation)
        statistics = None
        if plan.needs_statistics:
            with show.status("calibrating"):
                statistics = calibrate(source, prompts)
        copy = memory.parameter_count(source.config) * plan.scheme.weight_bits // 8
        memory.require_free("a quantised copy of the weights", copy, TOO_LARGE)
        with show.status("quantising"):
            target = quantize_target(source, plan, statistics=statistics)
            target = self._with_cache(target, cache, prompts)
            check_form(target, self.format)
        with show.status("comparing"):
            errors = layer_errors(source, target, prompts[0])
        if self.save_quantized:
            with show.status(f"writing {self.output_path}"):
                write_quantized(target, self.output_path, form=self.format, overwrite=self.overwrite)
        report = {
            "output": str(self.output_path) if self.save_quantized else None,
            "format": self.format,
            "quantization": target.quantization,
            "basis": target.basis,
            "cache": target.cache_format,
            "bytes": {
                "before": original,
                "after": target.nbytes,
                "ratio": round(target.nbytes / original, 4),
            },
            **matrix_report(source, target),
            "errors": errors,
        }
        if self.json:
            show.print_json(report)
        else:
            _print(report)
        return 0

    def _plan(self) -> tuple[Plan, str | None]:
        """(what to quantise, cache format) of the options. Raises ConfigError for combinations that cannot
        be."""
        match = re.fullmatch(r"(.+?)(c8|f8)?", self.quant_type.casefold())
        found = None if match is None else scheme_name(match[1])
        if match is None or found is None:
            raise ConfigError(
                f"--quant-type {self.quant_type!r} is not known; it is {', '.join(SCHEMES)}, with c8 or f8 "
                "at its end for the key and value cache"
            )
        scheme = get_scheme(found, self.group_size, asymmetric=self.asymmetric)
        plan = Plan(scheme, exclude=(*DEFAULT_EXCLUDE, *self.exclude), search=self.search, smooth=self.smooth)
        cache = CACHES[match[2] or ""]
        calibrated = plan.needs_statistics or (cache == "int8" and self.format == "modelslim")
        if calibrated and self.calib_prompts is None:
            what = "cache scales" if not plan.needs_statistics else f"{plan.label}"
            raise ConfigError(f"{what} must be calibrated; name a prompt file with --calib-prompts")
        if self.calib_samples is not None and self.calib_prompts is None:
            raise ConfigError("--calib-samples counts prompts of --calib-prompts; name that file")
        if self.calib_samples is not None and self.calib_samples < 1:
            raise ConfigError(f"--calib-samples is {self.calib_samples}; it must be 1 or more")
        places = {
            "eaglejax": tuple(CACHES.values()),
            "modelslim": (None, "int8"),
            "compressed-tensors": (None,),
        }
        if cache not in places[self.format] or (self.online_rot and self.format != "eaglejax"):
            what = "online rotations (R3, R4)" if self.online_rot else f"an {cache} cache"
            raise ConfigError(f"the {self.format} form has no place for {what}; use --format eaglejax")
        return plan, cache

    def _rotation_kind(self) -> Turn | None:
        if self.use_rot is False and (self.rotate or self.online_rot):
            raise ConfigError("--use-rot False contradicts --rotate and --online-rot; leave one out")
        kind = self.rotate or ("hadamard" if self.use_rot else None)
        if (kind == "block") != (self.rot_block_size is not None):
            raise ConfigError("--rot-block-size goes with --rotate block, which needs it")
        if kind is None and self.seed is not None:
            raise ConfigError("--seed draws the rotation, and none is asked for; see --rotate")
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}; it must be 0 or more")
        return kind

    def _rotated(self, target: ej.Target, kind: Turn | None) -> ej.Target:
        size = target.config.hidden_size
        rotation = None if kind is None else Rotation(kind, size, self.seed or 0, self.rot_block_size)
        return rotate_target(target, rotation, r3=self.online_rot, r4=self.online_rot)

    def _prompts(self, target: ej.Target) -> list[list[int]]:
        """Token ids of the calibration prompts, or of the one text that there is without."""
        most = min(LONGEST, target.context)
        if self.calib_prompts is None:
            return [target.need_tokenizer().encode(PROBE)[:most]]
        rows = read_prompts(
            self.calib_prompts, limit=SAMPLES if self.calib_samples is None else self.calib_samples
        )
        bad = [row.error for row in rows if isinstance(row, BadRow)]
        if bad:
            raise ConfigError(f"{len(bad)} calibration prompts cannot be read: {bad[0]}")
        good = [row for row in rows if not isinstance(row, BadRow)]
        return [list(encode_prompt(target, row.request([], chat=False)))[:most] for row in good]

    def _with_cache(
        self, target: ej.Target, cache: str | None, prompts: Sequence[Sequence[int]]
    ) -> ej.Target:
        if cache != "int8" or self.calib_prompts is None:
            return dataclasses.replace(target, cache_format=cache)
        scales = calibrate_cache(target, prompts)
        return dataclasses.replace(target, cache_format="int8-static", cache_scales=scales)


@functools.partial(jax.jit, static_argnames="config")
def _outputs(params: Any, config: ModelConfig, tokens: jax.Array, cache: Any) -> tuple[jax.Array, jax.Array]:
    """(outputs of all layers [N, L, H] f32, logits [N, V]) of one prompt."""
    n, layers = tokens.shape[1], tuple(range(1, config.num_layers + 1))
    positions = jnp.arange(n, dtype=jnp.int32)[None]
    out = decoder.forward(params, config, tokens, positions, cache, Causal(), aux=layers)
    assert out.aux is not None
    return out.aux[0].astype(jnp.float32), decoder.unembed(params, config, out.hidden)[0]


def layer_errors(before: ej.Target, after: ej.Target, prompt: Sequence[int]) -> dict[str, Any]:
    """How far the layers' outputs moved on ``prompt``: ``layers``, one number each, and ``logits``.

    Each is the root mean square over tokens of |difference| / |output before|, so that no token of large
    magnitude speaks for all. Both targets are in the same basis.
    """
    tokens = jnp.asarray([list(prompt)], jnp.int32)

    def outputs(target: ej.Target) -> tuple[np.ndarray, np.ndarray]:
        cache = decoder.init_cache(target.config, 1, tokens.shape[1], target.dtype)
        return jax.device_get(_outputs(target.params, target.config, tokens, cache))

    (x, logits), (y, moved) = outputs(before), outputs(after)

    def relative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        size = np.maximum(np.sum(a * a, axis=-1), 1e-30)
        return np.sqrt(np.mean(np.sum((a - b) ** 2, axis=-1) / size, axis=0))

    centred = [z - z.mean(-1, keepdims=True) for z in (logits, moved)]
    return {
        "layers": [round(float(e), 6) for e in relative(x, y)],
        "logits": round(float(relative(*centred)), 6),
    }


def matrix_report(before: ej.Target, after: ej.Target) -> dict[str, Any]:
    """``matrices``: one object a kind of weight (``layers.*.gate``) with its scheme, number and bytes before
    and after; ``excluded``: kinds of matrices that stayed as they were, with their number."""
    old, excluded = packed_leaves(before.params), Counter[str]()
    kinds: dict[tuple[str, str], dict[str, int]] = {}
    for path, value in packed_leaves(after.params).items():
        name = re.sub(r"\.\d+\.", ".*.", path)
        inner = value
        while is_packed(inner) and not isinstance(inner, QuantArray):
            inner = inner.inner
        if not isinstance(inner, QuantArray):
            if len(value.shape) > 1:
                excluded[name] += 1
            continue
        row = kinds.setdefault(
            (name, label([kind_of(inner)])), {"count": 0, "bytes_before": 0, "bytes_after": 0}
        )
        row["count"] += 1
        row["bytes_before"] += sum(leaf.nbytes for leaf in jax.tree.leaves(old[path]))
        row["bytes_after"] += sum(leaf.nbytes for leaf in jax.tree.leaves(value))
    matrices = [{"weights": name, "scheme": scheme, **row} for (name, scheme), row in kinds.items()]
    return {"matrices": matrices, "excluded": dict(excluded)}


def _print(report: dict[str, Any]) -> None:
    table = rich.table.Table(
        title=f"{report['quantization']} in the {report['format']} form", title_justify="left"
    )
    for heading in ("weights", "scheme", "count", "MB before", "MB after"):
        table.add_column(heading, justify="left" if heading in ("weights", "scheme") else "right")
    for row in report["matrices"]:
        sizes = (f"{row[key] / 1e6:.2f}" for key in ("bytes_before", "bytes_after"))
        table.add_row(row["weights"], row["scheme"], str(row["count"]), *sizes)
    for name, count in report["excluded"].items():
        table.add_row(name, "as it was", str(count), "", "")
    console = show.stderr()
    console.print(table)
    size, errors = report["bytes"], report["errors"]
    console.print(
        f"{size['before'] / 1e6:.1f} MB before, {size['after'] / 1e6:.1f} MB after ({size['ratio']:.1%})"
    )
    layers = " ".join(f"{error:.4f}" for error in errors["layers"])
    console.print(f"relative RMS error of layer outputs: {layers}; of logits {errors['logits']:.4f}")
    if report["basis"]:
        console.print(f"rotated: basis {report['basis']}; align drafts to it before they are used")
    if report["output"]:
        show.print_note(f"{report['output']} now holds the model")
