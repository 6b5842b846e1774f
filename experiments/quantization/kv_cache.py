"""What a narrow key/value cache costs: teacher-forced perplexity and agreement, and the bytes of a token.

    python -m experiments.quantization.kv_cache --answers answers.jsonl --target demo

Texts are chosen and scored as in ``experiments.quantization.perplexity``: every key and value is read from
the cache in its format, as decoding does. A variant is a cache format, with ``+r3`` where queries and keys
are rotated by a Hadamard matrix before they are stored. Figures of each: ``perplexity``; ``kl``, the mean
divergence from the first variant in nats a token; ``agreement``, the part of tokens whose likeliest next
token is the first variant's; ``bytes_per_token`` of keys and values in all layers; ``seconds`` of scoring,
compilation included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.kv_format import FORMATS, KVFormat
from eaglejax.models import memory
from eaglejax.models.target import Target
from eaglejax.quant.kv import calibrate_cache
from experiments.quantization.perplexity import keep, measure, parser, read_texts

ROTATED = ("int8", "fp8", "turbo4")
"""Formats that are measured with rotated keys too."""


def variant(target: Target, name: str, prompts: Sequence[Sequence[int]], seed: int) -> Target:
    """``target`` with the cache of a variant's name; ``prompts`` calibrate static scales."""
    form, *besides = name.split("+")
    if besides not in ([], ["r3"]):
        raise ConfigError(f"variant {name!r} is not known; behind a format stands +r3 or nothing")
    if besides:
        target = dataclasses.replace(target, config=dataclasses.replace(target.config, qk_rotation=True))
    chosen = KVFormat(form, seed) if KVFormat(form).rotation else KVFormat(form)
    scales = calibrate_cache(target, prompts) if chosen.static else None
    return dataclasses.replace(target, cache_format=chosen, cache_scales=scales)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every variant and write one result."""
    line = parser(__doc__, variants=None, tokens=300, width=128, name="kv_cache")
    line.add_argument("--seed", type=int, default=0, help="of the rotations")
    options = line.parse_args(arguments)
    target, calibration, texts = read_texts(options)
    narrow = [name for name in FORMATS if not KVFormat(name).plain]
    names = options.variants or [options.dtype, *narrow, *(f"{name}+r3" for name in ROTATED)]
    prompts = [text.ids.tolist() for text in calibration]
    figures: dict[str, Any] = {}
    base = None
    for name in names:
        found = measure(variant(target, name, prompts, options.seed), texts, options.width, base)
        base = found["logp"] if base is None else base
        del found["figures"]["bytes"]
        form = name.split("+")[0]
        figures[name] = {
            **found["figures"],
            "bytes_per_token": memory.cache_bytes_per_token(target.config, form),
        }
        print(name, " ".join(f"{k} {v:.6g}" for k, v in figures[name].items()), flush=True)
    keep(options, "kv_cache", texts, calibration, figures, seed=options.seed)


if __name__ == "__main__":
    main()
