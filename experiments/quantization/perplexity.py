"""What quantising a target costs: teacher-forced perplexity, and agreement with the float weights.

    python -m experiments.quantization.perplexity --answers answers.jsonl --target demo

``answers``: JSON Lines as training reads them (``eaglejax regenerate`` writes such). Scored are the answers'
tokens, each given all before it. The first ``--calibrate`` answers feed
calibration, where a variant needs it, and are not scored.

A variant is ``float``, or a scheme with what is done besides: ``w8a8``, ``w4a8-g32+mse``,
``w8a8-static+smooth``. Figures of each: ``perplexity``; ``kl``, the mean divergence KL(float || variant)
in nats a token; ``agreement``, the part of tokens whose likeliest next token is the float weights' own;
``bytes`` of all weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.target import load_target
from eaglejax.errors import ConfigError
from eaglejax.kv_format import KVFormat
from eaglejax.models import decoder
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.cache import CacheScales
from eaglejax.nn.visible import Causal
from eaglejax.quant.calibrate import Statistics, calibrate
from eaglejax.quant.quantize import quantize_target
from eaglejax.quant.schemes import as_plan
from eaglejax.speculate.generate import cache_form
from eaglejax.train.samples import Sample, read_samples
from experiments.record import record

VARIANTS = (
    "float",
    "w8a8",
    "w8a8+mse",
    "w4a8-g32",
    "w4a8",
    "w4a16",
    "w8a16",
    "w4a8-g32+mse",
    "w4a8+mse",
    "w4a16-g32",
    "w8a8-static",
    "w8a8-static+smooth",
    "w8a8+smooth",
)
SMOOTH = 0.5
"""Strength of smoothing; the paper's default."""
ROWS = 2000
"""Rows of the answers that are looked at, at most."""


def parser(
    text: str | None, *, variants: Sequence[str] | None, tokens: int, width: int, name: str
) -> argparse.ArgumentParser:
    """The command line of a study that scores variants of a target on answers."""
    out = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--answers", type=Path, required=True, help="JSON Lines of texts, as for training")
    out.add_argument("--target", default="demo", help="whatever load_target takes")
    out.add_argument("--dtype", default="bfloat16", help="of the float weights and of activations")
    out.add_argument("--variants", nargs="+", default=variants, help="default: all")
    out.add_argument("--tokens", type=int, default=tokens, help="answer tokens that are scored")
    out.add_argument("--width", type=int, default=width, help="longest text, prompt included")
    out.add_argument("--calibrate", type=int, default=16, help="answers that calibration reads")
    out.add_argument("--name", default=name, help="of the result")
    return out


def read_texts(options: argparse.Namespace) -> tuple[Target, list[Sample], list[Sample]]:
    """(the target, texts to calibrate on, texts to score) that a command line names."""
    target = load_target(options.target, dtype=options.dtype)
    texts = texts_of(target, options.answers, options.width, options.tokens, skip=options.calibrate)
    return target, *texts


def texts_of(
    target: Target, answers: Path, width: int, tokens: int, *, skip: int
) -> tuple[list[Sample], list[Sample]]:
    """(texts to calibrate on, texts to score) of a file of answers, see :func:`choose`."""
    samples, _ = read_samples(
        answers, target.need_tokenizer(), vocab_size=target.config.vocab_size, limit=ROWS
    )
    return choose(samples, width, tokens, skip)


def keep(
    options: argparse.Namespace,
    module: str,
    texts: Sequence[Sample],
    calibration: Sequence[Sample],
    figures: dict[str, Any],
    *,
    seed: int | None = None,
    **more: Any,
) -> None:
    """Write a study's result with the command that makes it again; ``more``: further settings."""
    words = ["--answers", options.answers.name, "--target", options.target]
    for name in ("tokens", "width", "calibrate", "dtype"):
        words += [f"--{name}", str(getattr(options, name))]
    if seed is not None:
        words += ["--seed", str(seed)]
    config = {
        "target": options.target,
        "dtype": options.dtype,
        "texts": len(texts),
        "tokens": options.tokens,
        "width": options.width,
        "calibration_texts": len(calibration),
    }
    record(
        "quantization",
        options.name,
        command=f"python -m experiments.quantization.{module} {shlex.join(words)}",
        config=config | more,
        seed=seed,
        figures=figures,
    )


def choose(
    samples: Sequence[Sample], width: int, tokens: int, skip: int
) -> tuple[list[Sample], list[Sample]]:
    """(the first ``skip`` texts, for calibration; more texts with ``tokens`` supervised tokens in all), each
    cut to ``width`` tokens; texts whose answer lies behind that are left out."""
    calibration: list[Sample] = []
    scored: list[Sample] = []
    left = tokens
    for sample in samples:
        text = _cut(sample, width)
        if not text.supervised.any():
            continue
        if len(calibration) < skip:
            calibration.append(text)
            continue
        last = np.flatnonzero(text.supervised)[:left][-1]
        scored.append(_cut(text, last + 1))
        left -= int(scored[-1].supervised.sum())
        if not left:
            return calibration, scored
    raise ConfigError(f"the answers hold {tokens - left} tokens that fit a width of {width}, not {tokens}")


def _cut(sample: Sample, width: int) -> Sample:
    return dataclasses.replace(sample, ids=sample.ids[:width], supervised=sample.supervised[:width])


def _forward(
    params: Any, config: ModelConfig, tokens: jax.Array, form: KVFormat, scales: CacheScales | None
) -> jax.Array:
    """log p of the next token after each of ``tokens`` [N]: [N, V] f32. ``form``, ``scales``: the cache's."""
    n = tokens.shape[0]
    cache = decoder.init_cache(config, 1, n, form, scales)
    out = decoder.forward(params, config, tokens[None], jnp.arange(n)[None], cache, Causal())
    return jax.nn.log_softmax(decoder.unembed(params, config, out.hidden)[0], axis=-1)


def score(target: Target, texts: Sequence[Sample], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(log p of every scored token [T], log p of everything in their place [T, V]), f32."""
    run = jax.jit(_forward, static_argnums=(1, 3))
    own, whole = [], []
    for text in texts:
        padded = np.zeros(width, np.int32)
        padded[: len(text)] = text.ids
        # What stands behind the text is seen by nothing before it.
        logp = np.asarray(run(target.params, target.config, padded, *cache_form(target)))
        places = np.flatnonzero(text.supervised)
        whole.append(logp[places - 1])
        own.append(logp[places - 1, text.ids[places]])
    return np.concatenate(own), np.concatenate(whole)


def variant(target: Target, name: str, statistics: Statistics) -> Target:
    """``target`` as a variant's name says."""
    if name == "float":
        return target
    scheme, *besides = name.split("+")
    unknown = sorted(set(besides) - {"mse", "smooth"})
    if unknown:
        raise ConfigError(f"variant {name!r}: {', '.join(unknown)} is not known; mse and smooth are")
    plan = dataclasses.replace(
        as_plan(scheme),
        search="mse" if "mse" in besides else "minmax",
        smooth=SMOOTH if "smooth" in besides else None,
    )
    return quantize_target(target, plan, statistics=statistics if plan.needs_statistics else None)


def measure(target: Target, texts: Sequence[Sample], width: int, base: np.ndarray | None) -> dict[str, Any]:
    """``figures`` of one variant and its ``logp`` [T, V]; ``base`` [T, V]: the float weights' (None: this is
    them)."""
    own, whole = score(target, texts, width)
    base = whole if base is None else base
    divergence = [float(np.sum(np.exp(b) * (b - w))) for b, w in zip(base, whole, strict=True)]
    return {
        "figures": {
            "perplexity": math.exp(-float(np.mean(own, dtype=np.float64))),
            "kl": float(np.mean(divergence)),
            "agreement": float(np.mean(base.argmax(-1) == whole.argmax(-1))),
            "bytes": target.nbytes,
        },
        "logp": whole,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every variant and write one result."""
    line = parser(__doc__, variants=VARIANTS, tokens=600, width=192, name="perplexity")
    options = line.parse_args(arguments)
    target, calibration, texts = read_texts(options)
    names = list(dict.fromkeys(["float", *options.variants]))
    statistics = Statistics({}, 0, 0)
    if any("static" in name or "smooth" in name for name in names):
        statistics = calibrate(target, [text.ids.tolist() for text in calibration], width=options.width)
    figures: dict[str, Any] = {}
    base = None
    for name in names:
        found = measure(variant(target, name, statistics), texts, options.width, base)
        base = found["logp"] if base is None else base
        figures[name] = found["figures"]
        print(name, " ".join(f"{k} {v:.6g}" for k, v in figures[name].items()), flush=True)
    more = {"calibration_tokens": statistics.tokens, "smooth": SMOOTH}
    keep(options, "perplexity", texts, calibration, figures, **more)


if __name__ == "__main__":
    main()
