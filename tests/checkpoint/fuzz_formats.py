"""What the fuzzer damages: one entry a format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import binary_mutators as binary
import file_mutators as damage
from fuzz_files import (
    Judge,
    Load,
    as_before,
    as_gguf,
    as_rows,
    as_safetensors,
    as_tokenizers,
    as_torch,
    as_transformers,
    load_draft_leaves,
    load_gguf_parts,
    load_hf,
    load_packed_leaves,
    load_rows,
    load_safetensors,
    load_tokens,
    load_torch,
    make_draft,
    make_first_draft,
    make_gguf,
    make_hf,
    make_pickled_draft,
    make_quantised,
    make_rows,
    make_safetensors,
    make_speculators,
    make_tokenizer,
    make_torch,
    make_written,
)

CONFIG, INDEX = ("config.json", damage.damage_json), ("*.index.json", damage.damage_json)
SETTINGS = (("*config.json", damage.damage_json), ("special_tokens_map.json", damage.damage_json))
MACHINE = damage.damage_part(
    *("pre_tokenizer", "decoder", "normalizer", "post_processor", "added_tokens", "truncation", "padding")
)
OWN = ("config.json", damage.damage_part("eaglejax"))
FOREIGN = ("config.json", damage.damage_part("quantization_config"))
DESCRIBED = ("quant_model_description.json", damage.damage_json)


@dataclasses.dataclass(frozen=True)
class Format:
    """How its files are made in an empty folder, damaged, read and judged. ``refused``: share of damaged
    files that are refused at the least; a damaged row costs itself and not its file."""

    make: Callable[[Path], None]
    damage: damage.Mutator
    load: Load
    judge: Judge
    refused: float = 0.1


def _draft(make: Callable[[Path], None], *more: tuple[str, damage.Mutator]) -> Format:
    return Format(make, damage.any_of(CONFIG, CONFIG, *more), load_draft_leaves, as_before)


def _packed(form: str, scheme: str, *described: tuple[str, damage.Mutator]) -> Format:
    pairs = (*described, *described, INDEX)
    return Format(make_quantised(form, scheme), damage.any_of(*pairs), load_packed_leaves, as_before)


FORMATS: dict[str, Format] = {
    "safetensors": Format(
        make_safetensors,
        damage.any_of(("model.safetensors", damage.damage_header)),
        load_safetensors,
        as_safetensors,
    ),
    "pytorch": Format(make_torch, damage.any_of(("*.bin", binary.damage_archive)), load_torch, as_torch),
    "gguf": Format(make_gguf, damage.any_of(("m.gguf", damage.damage_bytes)), load_gguf_parts, as_gguf),
    "gguf header": Format(make_gguf, damage.any_of(("m.gguf", binary.damage_gguf)), load_gguf_parts, as_gguf),
    "configuration": Format(make_hf, damage.any_of(CONFIG, CONFIG, INDEX), load_hf, as_transformers),
    "tokenizer": Format(
        make_tokenizer,
        damage.any_of(
            *SETTINGS,
            ("tokenizer.json", damage.damage_json),
            ("tokenizer.json", MACHINE),
            ("*.jinja", damage.damage_bytes),
        ),
        load_tokens,
        as_tokenizers,
    ),
    "draft": _draft(make_draft, INDEX),
    "draft of EAGLE-1": _draft(make_first_draft),
    "draft in a pickle": _draft(make_pickled_draft, ("*.bin", binary.damage_archive)),
    "draft, sglang": _draft(make_written("sglang")),
    "draft, modelopt": _draft(make_written("modelopt")),
    "draft, eaglejax": _draft(make_written("eaglejax")),
    "speculators": _draft(make_speculators),
    "modelslim": _packed("modelslim", "w8a8-static", DESCRIBED),
    "compressed-tensors": _packed("compressed-tensors", "w4a16-g16", FOREIGN),
    "eaglejax": _packed("eaglejax", "w4a8", OWN),
    "prompt rows": Format(
        make_rows, damage.any_of(("rows.jsonl", damage.damage_lines)), load_rows, as_rows, refused=0.02
    ),
}
