"""docs/targets.md, made from the registered families and the tiny models that they are tested with."""

from __future__ import annotations

from pathlib import Path

import hf_export
import published

from eaglejax.models import describe
from eaglejax.models.config import ModelConfig
from eaglejax.models.families import FAMILIES, NESTED

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"

HEAD = """# Targets

Families of targets by the `model_type` of their `config.json`, each a row of `eaglejax/models/`
over the layers of `eaglejax/nn/`. This page is made by `python tests/models/targets_page.py` from
the families and the tiny models that they are tested with.

Every family is compared with transformers: a tiny random model in f32, saved in its published
layout, read by this library, and run as a prompt, single tokens and a chunk behind them; logits and
every hidden-state boundary agree to 2e-5 of their largest number (`tests/models/test_families.py`,
`tests/models/test_targets.py`), and those of the latter speculate, with a random EAGLE-3 draft's
trees and with n-grams, to plain decoding's text (`tests/models/test_speculation_over_families.py`).
What a layer keeps of a tree that was verified (keys and values, latents, recurrent states) is tested
by kind in `tests/conformance/` and `tests/models/test_layer_kinds.py`.

A configuration that carries a key by which other models compute otherwise is refused by name. Draft
layers inside a checkpoint (`mtp.*`, layers behind the last one) are left out when a target is read.

| model_type | attention | feed-forward | else | rotation, quantisation |
|---|---|---|---|---|
"""

TAIL = """
 Weights are read from plain safetensors (float32, float16, bfloat16), from 8-bit floats in blocks
with a scale each (`quant_method` fp8, as DeepSeek-V3 is published), from 4-bit floats with a power
of two every 32 (mxfp4, as gpt-oss is), from GGUF and from
quantised folders. The first two become floats of the dtype asked for; activations are not narrowed.

`eaglejax inspect config.json` tells of a published configuration its shape, its kinds of layers, its
parameters and its memory a token, without the weights. GLM-5 with layers that share the choice of another
(`indexer_types`), DeepSeek-V4, Gemma 3n and MiMo-V2 are refused by name.

Not run here: any of these models at its published size. The tiny models have every part of the
large ones, at sizes at which nothing is a power of two by chance.
"""


def configs() -> dict[str, ModelConfig]:
    """A tiny model of every family."""
    built = [hf_export.build(name)[1] for name in hf_export.FAMILIES]
    built += [published.case(name)[0] for name in published.TARGETS]
    return {config.family: config for config in built}


def page() -> str:
    rows, known = [], configs()
    for name in sorted(FAMILIES):
        twin = next((n for n in known if FAMILIES[n] is FAMILIES[name]), None)
        assert twin is not None, f"no tiny model of {name}"
        config = known.get(name, known[twin])
        told = [name, *(f"{outer} (text_config)" for outer, inner in NESTED.items() if inner == name)]
        cells = [
            " / ".join(f"`{n}`" if " " not in n else n for n in told),
            *(describe.kinds_of(config, of) for of in (describe.attention_of, describe.feed_of)),
            describe.else_of(config),
            describe.support_of(config),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
