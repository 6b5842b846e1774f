"""Seeded damage to files: what a fuzzer does to bytes, to JSON and to the headers of weight files."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutator = Callable[[random.Random, Path], None]

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 10**399),
    *(0.0, 0.5, -1.5, 1e-320, 1e300, float("inf"), float("nan")),
    *("", "0", "16", "true", "None", "a\nb", "\ud800", "x" * 5000, "../..", "model.safetensors", "default"),
    *([], [1], ["a"], [[]], [None, 1], {}, {"a": 1}, {"type": "yarn"}, [1, 2, 3, 4]),
)
ODD_KEYS = (
    *("rope_scaling", "sliding_window", "query_pre_attn_scalar", "attention_bias", "layer_types", "head_dim"),
    *("final_logit_softcapping", "num_experts", "norm_topk_prob", "quantization_config", "eaglejax"),
    *("text_config", "eos_token_id", "is_rot_used", "optional", "group_size", "extra", "", "architectures"),
    *("target_hidden_size", "draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids"),
    *(
        "norm_before_residual",
        "norm_output",
        "fc_norm",
        "bias",
        "rope_parameters",
        "rope_theta",
        "model_type",
    ),
    *("speculators_config", "transformer_layer_config", "num_hidden_layers", "max_position_embeddings"),
)


def damage_bytes(rng: random.Random, path: Path) -> None:
    """Bytes changed, cut off, put in or moved."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 | 1 if data:
                data[at % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del data[at:]
            case 3:
                data[at:at] = rng.randbytes(rng.choice((1, 4, 40)))
            case 4:
                del data[at : at + rng.choice((1, 4, 40))]
            case _:
                data += rng.randbytes(rng.choice((1, 8, 100)))
    path.write_bytes(data)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(part, dict | list):
            found += _places(part)
    return found


def _nested(rng: random.Random) -> Any:
    value: Any = 1
    for _ in range(rng.choice((3, 70, 150))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def change_json(rng: random.Random, value: Any) -> Any:
    """A JSON value of which a few places are others."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(value)
        if not places:
            break
        inside, key = rng.choice(places)
        odd = _nested(rng) if rng.random() < 0.05 else copy.deepcopy(rng.choice(ODD_VALUES))
        match rng.randrange(8):
            case 0:
                del inside[key]
            case 1 if isinstance(inside, dict):
                inside[rng.choice(ODD_KEYS)] = odd
            case 2 if isinstance(inside, dict) and len(key) > 2:
                at = rng.randrange(len(key) - 1)
                inside[key[:at] + key[at + 1] + key[at] + key[at + 2 :]] = inside.pop(key)
            case 3:
                other, there = rng.choice(places)
                inside[key] = copy.deepcopy(
                    other.get(there) if isinstance(other, dict) else other[there : there + 1]
                )
            case 4 if isinstance(inside[key], int) and not isinstance(inside[key], bool):
                inside[key] = rng.choice(
                    (inside[key] + 1, inside[key] - 1, 2 * inside[key], str(inside[key]))
                )
            case _:
                inside[key] = odd
    return value


def damage_json(rng: random.Random, path: Path) -> None:
    """A file of JSON changed as a value, or sometimes as text."""
    if rng.random() < 0.15:
        damage_bytes(rng, path)
        return
    changed = change_json(rng, json.loads(path.read_text(encoding="utf-8")))
    path.write_bytes(json.dumps(changed).encode("utf-8", "surrogatepass"))


def damage_part(*keys: str) -> Mutator:
    """As ``damage_json``, within one entry of the object."""

    def run(rng: random.Random, path: Path) -> None:
        whole = json.loads(path.read_text(encoding="utf-8"))
        key = rng.choice([k for k in keys if k in whole])
        whole[key] = change_json(rng, {key: whole[key]}).get(key)
        path.write_bytes(json.dumps(whole).encode())

    return run


def damage_header(rng: random.Random, path: Path) -> None:
    """A safetensors file whose header says something else of the same data, or whose bytes are damaged."""
    if rng.random() < 0.3:
        damage_bytes(rng, path)
        return
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    one, two = rng.choice(names), rng.choice(names)
    match rng.randrange(8):
        case 0:
            header[one]["data_offsets"], header[two]["data_offsets"] = (
                header[two]["data_offsets"],
                header[one]["data_offsets"],
            )
        case 1:
            by = rng.choice((1, -1, 4, -4, 64, 2**40))
            header[one]["data_offsets"] = [n + by for n in header[one]["data_offsets"]]
        case 2:
            header[one]["dtype"] = rng.choice(("F32", "I32", "F16", "BF16", "I8", "F64", "BOOL", "F4", "f32"))
        case 3:
            header[one]["shape"] = header[one]["shape"][::-1]
        case 4:
            header[one + rng.choice(("", ".", ".weight", "_"))] = header.pop(two)
        case 5:
            rest = rest[: rng.randrange(len(rest))] if rng.random() < 0.5 else rest + rng.randbytes(8)
        case _:
            header = change_json(rng, header)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    if rng.random() < 0.08:
        # As text: a name twice, a number spelt otherwise, another beginning.
        old, new = rng.choice(
            (
                (json.dumps(one).encode(), json.dumps(two).encode()),
                (b"[0,", b"[0.0,"),
                (b"[0,", b"[-0,"),
                (b'"shape"', b'"shape": [1], "shape"'),
                (b"{", b" {"),
                (b"}}", b"}} "),
                (b"}}", b"},}"),
            )
        )
        text = text.replace(old, new, 1)
    claimed = len(text) if rng.random() < 0.95 else rng.choice((0, 2**20, 2**63, len(text) - 1))
    path.write_bytes(claimed.to_bytes(8, "little") + text + rest)


def damage_lines(rng: random.Random, path: Path) -> None:
    """A file of JSON Lines in which one line is another value, or whose bytes are damaged."""
    if rng.random() < 0.15:
        damage_bytes(rng, path)
        return
    lines = path.read_bytes().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(change_json(rng, json.loads(lines[at]))).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")


def any_of(*pairs: tuple[str, Mutator]) -> Mutator:
    """Damage one of a folder's files; each pair is a pattern and what is done to a file of it."""

    def run(rng: random.Random, folder: Path) -> None:
        pattern, mutate = rng.choice(pairs)
        mutate(rng, rng.choice(sorted(folder.glob(pattern))))

    return run
