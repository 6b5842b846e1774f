"""What each piece of an alignment to a rotated target is worth: the ladder.

    python -m experiments.rotation.ladder --target demo --draft DRAFT --prompts prompts.jsonl --limit 8

The target is rotated in memory, the draft bound to it, mended as far as each rung says, and the prompts
decoded greedily with a chain of drafts. A rung records tau, acceptance by position, whether the tokens are
those of plain decoding with the same target, and whether every round accepted what it accepts for the
original pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eaglejax as ej
from eaglejax.api import encode_prompt
from eaglejax.cli import show
from eaglejax.config import BadRow, read_prompts
from eaglejax.drafts.align import align_params
from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import bind, read_weights
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.features import FeatureAdapter
from eaglejax.drafts.places import draft_path
from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.models.target import Target
from eaglejax.rotation.basis import Basis
from eaglejax.rotation.rotate import Rotation, rotate_target
from eaglejax.speculate.generate import BatchDecoder, DecodeOptions, Request
from eaglejax.speculate.metrics import Stats, total
from experiments import record

RUNGS = (
    "original",
    "unaligned",
    "features only",
    "embedding only",
    "wrong orientation",
    "twice",
    "gamma not divided",
    "aligned",
)


def rung(
    name: str, config: EagleConfig, weights: Any, ids: np.ndarray | None, original: Target, rotated: Target
) -> EagleParams:
    """A draft of ``original`` bound to ``rotated`` and mended as ``name`` (one of ``RUNGS``) says; for
    "original", bound to the original. All have maps at the same places, so that they run one program."""
    basis = rotated.rotation
    assert basis is not None
    bound = bind(config, weights, rotated, ids)
    if name == "original":
        out = bind(config, weights, original, ids)
    elif name == "unaligned":
        out = bound
    elif name == "features only":
        out = align_params(bound, config, basis, parts=("features",))
    elif name == "embedding only":
        out = align_params(bound, config, basis, parts=("embedding", "head"))
    elif name == "wrong orientation":
        out = align_params(bound, config, Basis(basis.matrix.T.copy(), basis.gamma))
    elif name == "gamma not divided":
        out = align_params(bound, config, Basis(basis.matrix, np.ones(basis.size, np.float32)))
    elif name in ("aligned", "twice"):
        out = align_params(bound, config, basis)
        if name == "twice":
            again = tuple(None if m is None else m @ m for m in out.adapter.target)
            out = dataclasses.replace(out, adapter=FeatureAdapter(target=again))
    else:
        raise ConfigError(f"rung {name!r} is not known; they are {', '.join(RUNGS)}")
    if not out.adapter.target:
        same = (jnp.eye(basis.size),) * max(config.num_aux, 1)
        out = dataclasses.replace(out, adapter=FeatureAdapter(target=same))
    if out.head is not None and out.tied:
        out = dataclasses.replace(out, head=jnp.asarray(out.head).T, tied=False)
    return out


def decode(
    target: Target, proposer: Any, params: Any, prompts: Sequence[Sequence[int]], limit: int
) -> tuple[list[list[int]], list[list[int]], Stats]:
    """(tokens, tokens settled a round, statistics) of each prompt, greedy, one prompt at a time."""
    tokens, traces, stats = [], [], []
    for prompt in prompts:
        run = BatchDecoder(
            target,
            proposer,
            params,
            [Request(tuple(prompt), ej.Sampling(seed=0), limit)],
            options=DecodeOptions(rounds_a_chunk=1, speculation="fixed"),
        )
        traces.append([len(piece.token_ids) for piece in run])
        (result,) = run.results()
        tokens.append(result.token_ids)
        stats.append(result.stats)
    return tokens, traces, total(stats)


def climb(
    original: Target,
    rotated: Target,
    config: EagleConfig,
    weights: Any,
    ids: np.ndarray | None,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    limit: int,
) -> dict[str, dict[str, Any]]:
    """Every rung's figures."""
    proposer = ej.Eagle(config, ej.chain(length))
    plain = {t.basis: decode(t, Autoregressive(), None, prompts, limit)[0] for t in (original, rotated)}
    first: list[list[int]] = []
    out = {}
    with show.progress("rungs", len(RUNGS)) as advance:
        for name in RUNGS:
            target = original if name == "original" else rotated
            params = rung(name, config, weights, ids, original, rotated)
            begin = time.perf_counter()
            tokens, trace, stats = decode(target, proposer, params, prompts, limit)
            first = first or trace
            figures = stats.to_json()
            out[name] = {
                "tau": figures["mean_acceptance_length"],
                "per_position_acceptance_rate": figures["per_position_acceptance_rate"],
                "n_alpha": figures["n_alpha"],
                "num_tokens": figures["num_tokens"],
                "target_forwards": figures["target_forwards"],
                "identical_to_ar": tokens == plain[target.basis],
                "same_text_as_original": tokens == plain[original.basis],
                "same_trace_as_original": trace == first,
                "seconds": time.perf_counter() - begin,
            }
            advance()
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.rotation.ladder", description=__doc__)
    parser.add_argument("--target", default="demo", help="the model before the rotation")
    parser.add_argument("--draft", required=True, help="an EAGLE draft that was made for it")
    parser.add_argument(
        "--prompts", required=True, help="a prompt file; conversations by their first question"
    )
    parser.add_argument("--limit", type=int, default=8, help="prompts that are used")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=5, help="drafts in the chain")
    parser.add_argument("--rotation", choices=("hadamard", "random"), default="hadamard")
    parser.add_argument("--seed", type=int, default=0, help="of the rotation")
    parser.add_argument("--dtype", default="float32", help="in bfloat16 near ties may change the text")
    parser.add_argument("--name", default="ladder", help="of the result")
    parser.add_argument("--root", type=Path, default=record.ROOT, help="where the study's results lie")
    args = parser.parse_args(argv)
    try:
        path = study(args)
    except EaglejaxError as error:
        show.print_error(str(error))
        return 2
    show.print_note(f"written to {path}")
    return 0


def study(args: argparse.Namespace) -> Path:
    """The result file of one run; of the prompts' file it keeps the name, not the place."""
    original = ej.load_target(args.target, dtype=args.dtype)
    file = read_draft(draft_path(args.draft))
    config = file.config.fit(original.config)
    weights = read_weights(file, original.dtype)
    prompts = [_encoded(original, row) for row in read_prompts(args.prompts)[: args.limit]]
    begin = time.perf_counter()
    with show.status("rotating the target"):
        rotation = Rotation(args.rotation, original.config.hidden_size, args.seed)
        rotated = rotate_target(original, rotation, r2=False)
        jax.block_until_ready(rotated.params)
    seconds = time.perf_counter() - begin
    rungs = climb(
        *(original, rotated, config, weights, file.ids, prompts),
        length=args.length,
        limit=args.max_new_tokens,
    )
    for name, figures in rungs.items():
        text, trace = (
            "as" if figures[k] else "NOT as" for k in ("identical_to_ar", "same_trace_as_original")
        )
        show.print_note(
            f"{name:>18}: tau {figures['tau']:.3f}, text {text} plain decoding's, "
            f"rounds {trace} the original's"
        )
    settings = {k: v for k, v in vars(args).items() if k not in ("root", "name")}
    settings |= {"prompts": Path(args.prompts).name, "draft": Path(args.draft).name}
    options = [f"--{k.replace('_', '-')} {v}" for k, v in settings.items()]
    return record.record(
        "rotation",
        args.name,
        command=" ".join(["python -m experiments.rotation.ladder", *options, f"--name {args.name}"]),
        config=settings | {"basis": rotated.basis, "prompts_used": len(prompts)},
        seed=args.seed,
        figures={"rungs": rungs, "seconds_to_rotate": seconds},
        root=args.root,
    )


def _encoded(target: Target, row: Any) -> tuple[int, ...]:
    if isinstance(row, BadRow):
        raise ConfigError(f"row {row.id}: {row.error}")
    return encode_prompt(target, row.request([], chat=True))


if __name__ == "__main__":
    sys.exit(main())
