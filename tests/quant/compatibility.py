"""Every drafting method on every weight scheme with every cache format: one tiny target, greedy, in f32.

A cell says whether the method wrote the text that plain decoding writes with the same weights and cache.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import eaglejax as ej
from eaglejax.cli.methods import METHODS, proposer_from
from eaglejax.config import SpeculativeConfig
from eaglejax.models.target import Target
from eaglejax.nn.kv_format import FORMATS
from eaglejax.quant import SCHEMES, calibrate, quantize_target
from eaglejax.quant.kv import calibrate_cache

PLAIN = "float"
METHOD_AXIS = tuple(name for name in METHODS if name != "ar")
SCHEME_AXIS = (PLAIN, *SCHEMES)
CACHE_AXIS = FORMATS
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
TOKENS = 12


@functools.cache
def files() -> dict[str, str]:
    """Folders of the tiny model and of a draft for each method that needs one."""
    from tiny_draft import EAGLE1, EAGLE3, write_eagle
    from tiny_model import write_model

    root = Path(tempfile.mkdtemp(prefix="compatibility-"))
    model = write_model(root / "model")
    one, three = write_eagle(root / "one", EAGLE1), write_eagle(root / "three", EAGLE3)
    drafts = {"eagle": three, "eagle1": one, "eagle2": one, "eagle3": three, "draft_model": model}
    return {"model": model} | {name: path for name, path in drafts.items() if name in METHODS}


@functools.cache
def prompt() -> str:
    """Printable characters: whatever the model writes, a lookup soon finds it here."""
    from tiny_model import PRINTABLE

    return PRINTABLE[:40]


@functools.cache
def float_target() -> Target:
    return ej.load_target(files()["model"], dtype="float32")


@functools.cache
def ids() -> list[int]:
    return float_target().need_tokenizer().encode(prompt())


@functools.cache
def target_of(scheme: str) -> Target:
    if scheme == PLAIN:
        return float_target()
    statistics = calibrate(float_target(), [ids()]) if SCHEMES[scheme].activation == "static" else None
    return quantize_target(float_target(), scheme, statistics=statistics)


@functools.cache
def scales(scheme: str):
    return calibrate_cache(target_of(scheme), [ids()])


def decode(method: str, scheme: str, cache: str, prediction: str | None = None) -> list[int]:
    target = target_of(scheme)
    if not METHODS[method].needs_draft:
        config = SpeculativeConfig(method)
    else:
        config = SpeculativeConfig(method, model=files()[method])
    return ej.generate(
        target,
        [ids()],
        proposer=proposer_from(target, config),
        predictions=[prediction] if METHODS[method].reads_prediction else None,
        max_new_tokens=TOKENS,
        ignore_eos=True,
        cache_dtype=cache,
        cache_scales=scales(scheme) if cache == "int8-static" else None,
    )[0].token_ids


@functools.cache
def plain(scheme: str, cache: str) -> list[int]:
    return decode("ar", scheme, cache)


def same(method: str, scheme: str, cache: str) -> bool:
    """Whether a method writes plain decoding's text."""
    want = plain(scheme, cache)
    text = float_target().need_tokenizer().decode(want)
    return decode(method, scheme, cache, text) == want


def page(cells: dict[tuple[str, str, str], bool]) -> str:
    """docs/compatibility.md of measured cells."""
    lines = [
        "# Compatibility",
        "",
        "Drafting methods on weight schemes with formats of keys and values. This page is written by",
        "`pytest -m slow tests/quant/test_compatibility.py`: a tiny target decodes greedily in f32, plainly",
        "and with each method, its weights and cache in the forms of the section and the row. `=`: the same",
        "tokens; `x`: other ones. How fast a cell is, [performance.md](performance.md) says.",
    ]
    for scheme in SCHEME_AXIS:
        lines += [
            "",
            f"## {scheme}",
            "",
            f"| cache | {' | '.join(METHOD_AXIS)} |",
            "|---" * (len(METHOD_AXIS) + 1) + "|",
        ]
        for cache in CACHE_AXIS:
            marks = ["=" if cells[method, scheme, cache] else "x" for method in METHOD_AXIS]
            lines.append(f"| {cache} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"
