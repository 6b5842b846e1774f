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

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.target import load_target
from eaglejax.devices import memory
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target
from eaglejax.nn.kv_format import FORMATS, KVFormat
from eaglejax.quant.kv import calibrate_cache
from eaglejax.train.samples import read_samples
from experiments.quantization.perplexity import ROWS, choose, measure
from experiments.record import record

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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=Path, required=True, help="JSON Lines of texts, as for training")
    parser.add_argument("--target", default="demo", help="whatever load_target takes")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations")
    parser.add_argument("--variants", nargs="+", help="default: the weights' dtype, then all formats")
    parser.add_argument("--tokens", type=int, default=300, help="answer tokens that are scored")
    parser.add_argument("--width", type=int, default=128, help="longest text, prompt included")
    parser.add_argument("--calibrate", type=int, default=16, help="answers that calibration reads")
    parser.add_argument("--seed", type=int, default=0, help="of the rotations")
    parser.add_argument("--name", default="kv_cache", help="of the result")
    options = parser.parse_args(arguments)
    target = load_target(options.target, dtype=options.dtype)
    samples, _ = read_samples(
        options.answers, target.need_tokenizer(), vocab_size=target.config.vocab_size, limit=ROWS
    )
    calibration, texts = choose(samples, options.width, options.tokens, options.calibrate)
    narrow = [name for name in FORMATS if not KVFormat(name).plain]
    names = options.variants or [options.dtype, *narrow, *(f"{name}+r3" for name in ROTATED)]
    figures: dict[str, Any] = {}
    base = None
    for name in names:
        cached = variant(target, name, [text.ids.tolist() for text in calibration], options.seed)
        found = measure(cached, texts, options.width, base)
        base = found["logp"] if base is None else base
        del found["figures"]["bytes"]
        form = name.split("+")[0]
        figures[name] = {
            **found["figures"],
            "bytes_per_token": memory.cache_bytes_per_token(target.config, form),
        }
        print(name, " ".join(f"{k} {v:.6g}" for k, v in figures[name].items()), flush=True)
    command = "python -m experiments.quantization.kv_cache " + shlex.join(
        ["--answers", options.answers.name, "--target", options.target]
    )
    config = {
        "target": options.target,
        "dtype": options.dtype,
        "texts": len(texts),
        "tokens": options.tokens,
        "width": options.width,
        "calibration_texts": len(calibration),
    }
    record("quantization", options.name, command=command, config=config, seed=options.seed, figures=figures)


if __name__ == "__main__":
    main()
