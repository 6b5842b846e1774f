"""``eaglejax quantize``: a target with quantised weights, perhaps rotated before, written to a folder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.table
import tyro

import eaglejax as ej
from eaglejax.checkpoint.files import check_output
from eaglejax.cli import methods, show
from eaglejax.config import BadRow, PromptRow, read_prompts
from eaglejax.errors import ConfigError
from eaglejax.quant.schemes import DEFAULT_EXCLUDE, SCHEMES, Plan, QuantizedForm, get_scheme, scheme_name

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
        rows = self._rows()
        source = methods.load_target(self.model_path, dtype=self.dtype)
        # How keys and values are held is this command's to say, and scales belong to the weights as read.
        source = dataclasses.replace(source, cache_format=None, cache_scales=None)
        from eaglejax.checkpoint.quantized.write import check_form, write_quantized
        from eaglejax.measure.quantized import layer_errors, matrix_report
        from eaglejax.models import memory
        from eaglejax.quant.calibrate import calibrate
        from eaglejax.quant.quantize import quantize_target

        prompts = self._prompts(source, rows)
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
        methods.check_count("--calib-samples", self.calib_samples)
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
        from eaglejax.rotation.rotate import Rotation, rotate_target

        size = target.config.hidden_size
        rotation = None if kind is None else Rotation(kind, size, self.seed or 0, self.rot_block_size)
        return rotate_target(target, rotation, r3=self.online_rot, r4=self.online_rot)

    def _rows(self) -> list[PromptRow]:
        """The calibration prompts. Raises ConfigError where some cannot be read."""
        if self.calib_prompts is None:
            return []
        most = SAMPLES if self.calib_samples is None else self.calib_samples
        rows = read_prompts(self.calib_prompts, limit=most)
        bad = [row.error for row in rows if isinstance(row, BadRow)]
        if bad:
            raise ConfigError(f"{len(bad)} calibration prompts cannot be read: {bad[0]}")
        return [row for row in rows if isinstance(row, PromptRow)]

    def _prompts(self, target: ej.Target, rows: Sequence[PromptRow]) -> list[list[int]]:
        """Token ids of the calibration prompts, or of the one text that there is without."""
        from eaglejax.api import encode_prompt

        most = min(LONGEST, target.context)
        if not rows:
            return [target.need_tokenizer().encode(PROBE)[:most]]
        return [list(encode_prompt(target, row.request([], chat=False)))[:most] for row in rows]

    def _with_cache(
        self, target: ej.Target, cache: str | None, prompts: Sequence[Sequence[int]]
    ) -> ej.Target:
        if cache != "int8" or self.calib_prompts is None:
            return dataclasses.replace(target, cache_format=cache)
        from eaglejax.quant.kv import calibrate_cache

        scales = calibrate_cache(target, prompts)
        return dataclasses.replace(target, cache_format="int8-static", cache_scales=scales)


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
