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
from eaglejax.kv_format import FORMATS
from eaglejax.models.target import Target
from eaglejax.quant.calibrate import calibrate
from eaglejax.quant.kv import calibrate_cache
from eaglejax.quant.quantize import quantize_target
from eaglejax.quant.schemes import SCHEMES

PLAIN, PLAIN_CACHE = "float", "float32"
TREE = "eagle3"
METHOD_AXIS = tuple(name for name in METHODS if name not in ("ar", "cascade"))
"""A cascade is what its parts are."""
SCHEME_AXIS = (PLAIN, *SCHEMES)
CACHE_AXIS = FORMATS
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
TOKENS = 12


@functools.cache
def files() -> dict[str, str]:
    """Folders of the tiny model and of a draft for each method that needs one."""
    from tiny_draft import EAGLE1, EAGLE3, write_dflash, write_eagle, write_medusa, write_mtp
    from tiny_model import write_model

    root = Path(tempfile.mkdtemp(prefix="compatibility-"))
    model = write_model(root / "model")
    one, three = write_eagle(root / "one", EAGLE1), write_eagle(root / "three", EAGLE3)
    drafts = {"eagle": three, "eagle1": one, "eagle2": one, "eagle3": three, "draft_model": model}
    drafts["dflash"] = write_dflash(root / "dflash")
    drafts["medusa"] = write_medusa(root / "medusa")
    drafts["mtp"] = write_mtp(root / "mtp", ej.load_target(model, dtype="float32"))
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
    if method not in files():
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


def cells() -> list[tuple[str, str, str]]:
    """Every pair of two axes, the third one plain: methods on schemes, on caches, and schemes on caches under
    a tree of drafts."""
    pairs = [(m, s, PLAIN_CACHE) for m in METHOD_AXIS for s in SCHEME_AXIS]
    pairs += [(m, PLAIN, c) for m in METHOD_AXIS for c in CACHE_AXIS]
    pairs += [(TREE, s, c) for s in SCHEME_AXIS for c in CACHE_AXIS]
    return list(dict.fromkeys(pairs))


def page(found: dict[tuple[str, str, str], bool]) -> str:
    """docs/compatibility.md of measured cells."""
    lines = [
        "# Compatibility",
        "",
        "Drafting methods, weight schemes and formats of keys and values, pair by pair. This page is written",
        "by `pytest -m slow tests/quant/test_compatibility.py`: a tiny target decodes greedily in f32, plain",
        "and with the method, its weights and cache in the forms named. `=`: the same tokens; `x`: others.",
        "The drafts but the draft model are random, so that most of their guesses are rejected; what",
        "lookups, predictions and the draft model (the float target itself) guess is accepted.",
        "How fast a cell is, [performance.md](performance.md) says.",
    ]

    def table(title: str, corner: str, rows: tuple[str, ...], columns: tuple[str, ...], cell) -> None:
        lines.extend(["", f"## {title}", "", f"| {corner} | {' | '.join(columns)} |"])
        lines.append("|---" * (len(columns) + 1) + "|")
        for row in rows:
            marks = ["=" if found[cell(row, column)] else "x" for column in columns]
            lines.append(f"| {row} | {' | '.join(marks)} |")

    table(
        f"Methods on weight schemes, cache {PLAIN_CACHE}",
        "scheme",
        SCHEME_AXIS,
        METHOD_AXIS,
        lambda s, m: (m, s, PLAIN_CACHE),
    )
    table(
        "Methods on cache formats, weights float",
        "cache",
        CACHE_AXIS,
        METHOD_AXIS,
        lambda c, m: (m, PLAIN, c),
    )
    table(
        f"Weight schemes on cache formats, method {TREE}",
        "cache",
        CACHE_AXIS,
        SCHEME_AXIS,
        lambda c, s: (TREE, s, c),
    )
    return "\n".join(lines) + "\n"
