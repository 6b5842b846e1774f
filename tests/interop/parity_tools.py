"""A tiny target with an EAGLE-3 and an EAGLE-1 draft for the parity tests, and one recording for all."""

import contextlib
import dataclasses
import functools
import io
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
from tiny_draft import EAGLE3
from tiny_model import write_model

from eaglejax.cli.main import main
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.drafts.eagle.model import init_eagle
from eaglejax.interop.parity.bundle import Bundle

TREE3 = '{"method": "eagle3", "tree_depth": 3, "tree_branching": 2, "tree_nodes": 6}'
TREE1 = '{"method": "eagle1", "speculative_token_tree": [[0], [1], [0, 0]]}'


def write_pair(folder, config, *, layers=2):
    """(target folder, draft folder)."""
    target = write_model(folder / "target", layers=layers)
    weights = init_eagle(config, jax.random.key(1))
    # Weights of the usual size: at the initialiser's own a draft's layers hardly change what they are given.
    weights = jax.tree.map(lambda w: w * 8 if w.ndim > 1 else w, weights)
    ids = np.arange(40, 40 + config.draft_vocab_size) if config.reduced else None
    write_draft(
        folder / "draft",
        config,
        tensors_of_weights(config, weights),
        ids,
        to="safeailab" if config.version == 1 else "speculators",
    )
    return target, str(folder / "draft")


def write_prompts(path, *prompts):
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt": p}) + "\n" for i, p in enumerate(prompts)))
    return str(path)


PROMPTS = ("hello there", "abc")
ROUNDS = 2
TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Recording:
    """The EAGLE-3 pair in float32, compared with torch-cpu and recorded.

    ``folder`` holds ``target``, ``draft``, ``prompts.jsonl``, and the weights beside the bundle. ``status``,
    ``report``: of the command.
    """

    folder: Path
    status: int
    report: dict

    @property
    def path(self):
        return self.folder / "bundle"

    @property
    def weights(self):
        return self.folder / "weights.bin"

    def open(self):
        return Bundle(self.path, weights=self.weights)


_FOLDERS = []


@functools.cache
def recorded():
    """Made once a process."""
    _FOLDERS.append(tempfile.TemporaryDirectory())
    folder = Path(_FOLDERS[-1].name)
    target, draft = write_pair(folder, EAGLE3)
    prompts = write_prompts(folder / "prompts.jsonl", *PROMPTS)
    argv = ["parity", "--target", target, "--draft", draft, "--prompts", prompts, "--json"]
    argv += ["--max-new-tokens", str(TOKENS), "--speculative-config", TREE3, "--backend", "torch-cpu"]
    argv += ["--record", str(folder / "bundle"), "--record-rounds", str(ROUNDS)]
    argv += ["--weights", str(folder / "weights.bin")]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(argv)
    return Recording(folder, status, json.loads(out.getvalue()))
