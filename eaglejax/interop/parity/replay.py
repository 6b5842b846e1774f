"""Comparing this machine with a recorded JAX run: ``python replay.py`` in a bundle, ``eaglejax parity``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import platform
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eaglejax.errors import CheckpointError, EaglejaxError
from eaglejax.interop.backends.adapter import BACKENDS, DeviceAdapter, get_adapter
from eaglejax.interop.parity import report
from eaglejax.interop.parity.bundle import Bundle
from eaglejax.interop.parity.check import Checker, Prompt
from eaglejax.interop.parity.compare import ATTENTION_TOLERANCE, TOLERANCE, Stage, tolerance
from eaglejax.interop.parity.names import parse


def torch_side(adapter: DeviceAdapter) -> dict[str, Any]:
    """What the torch run was made by: backend, versions, device, and the limits of its operators."""
    return {
        "backend": adapter.name,
        **adapter.describe(),
        "availability": adapter.available().reason,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "limits": dataclasses.asdict(adapter.limits),
    }


def compare(
    checker: Checker,
    prompts: Iterable[tuple[Prompt, Iterable[Stage]]],
    adapter: DeviceAdapter,
    *,
    about: dict[str, Any],
    reproduce: str,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The report of all ``prompts``; ``about``: sections ``jax_side`` and ``models``; ``reproduce``: see
    ``report.build``."""
    results = []
    for prompt, stages in prompts:
        results.append(checker.check(prompt, stages))
        progress()
    return report.build(
        results,
        operations=checker.operations,
        free=checker.free,
        about={"torch_side": torch_side(adapter), **about},
        tolerances={
            "dtype": checker.dtype,
            "operation": TOLERANCE[checker.dtype],
            "attention": ATTENTION_TOLERANCE[checker.dtype],
            "tie": checker.tie,
        },
        reproduce=reproduce,
    )


def replay(
    bundle: Bundle, adapter: DeviceAdapter, *, limit: int | None = None, reproduce: str | None = None
) -> dict[str, Any]:
    """Compare ``adapter`` with a bundle's run: the report. ``limit``: first prompts only."""
    target, draft = bundle.models()
    checker = Checker(target, draft, adapter, dtype=bundle.dtype, eos_ids=bundle.eos_ids)
    prompts = [Prompt(p.name, p.tokens, p.budget) for p in bundle.prompts][:limit]
    return compare(
        checker,
        ((prompt, bundle.stages(number)) for number, prompt in enumerate(prompts)),
        adapter,
        about=about_bundle(bundle),
        reproduce=reproduce
        or f"python replay.py --backend {adapter.name} --prompt {{prompt}} --only {{name}}",
    )


def about_bundle(bundle: Bundle) -> dict[str, Any]:
    """The sections of a report that describe the recorded run."""
    manifest = bundle.manifest
    tree = {k: v for k, v in manifest["models"]["tree"].items() if k not in ("type", "parent", "rank")}
    return {
        "jax_side": {"eaglejax": manifest["eaglejax"], "written": manifest["written"], **manifest["machine"]},
        "models": {**manifest["names"], "dtype": bundle.dtype, "tree": tree},
    }


@contextlib.contextmanager
def open_bundle(path: Path, *, weights: Path | None = None) -> Iterator[Bundle]:
    """The bundle in a folder or a ``.zip``, checked. Raises CheckpointError for what is damaged, by name."""
    if path.is_dir():
        yield Bundle(path, weights=weights)
        return
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; give the folder or .zip of a parity recording")
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                size, free = sum(i.file_size for i in archive.infolist()), shutil.disk_usage(folder).free
                if size > free:
                    raise CheckpointError(
                        f"{path} unpacks to {size} bytes, and {free} are free for temporary files (TMPDIR)"
                    )
                archive.extractall(folder)
        except CheckpointError:
            raise
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
            # Among others those of encrypted members and unknown compressions, which are plain RuntimeErrors.
            raise CheckpointError(f"{path} is no .zip, or a damaged one: {error}") from error
        yield Bundle(Path(folder), weights=weights)


def isolate(
    bundle: Bundle, adapter: DeviceAdapter, *, prompt: str, name: str, save: Path | None
) -> dict[str, Any]:
    """One operation on the recorded inputs, as JSON-ready data; ``save``: a folder for its arrays."""
    names = [str(p.name) for p in bundle.prompts]
    if prompt not in names:
        raise CheckpointError(f"the recording has no prompt {prompt!r}; it has {', '.join(names)}")
    number = names.index(prompt)
    asked = bundle.prompts[number]
    target, draft = bundle.models()
    checker = Checker(target, draft, adapter, dtype=bundle.dtype, eos_ids=bundle.eos_ids)
    found = checker.isolate(Prompt(asked.name, asked.tokens, asked.budget), bundle.stages(number), name)
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        np.save(save / "expected.npy", found.expected.values)
        np.save(save / "found.npy", found.found)
        before: dict[str, Any] = {key: x.values for key, x in found.before.items()}
        np.savez(save / "before.npz", **before)
    allowed = tolerance(checker.dtype, parse(name))
    return {"difference": found.difference.to_json(), "tolerance": allowed, "hint": found.hint}


def main(folder: Path, argv: Sequence[str] | None = None) -> int:
    """The command of a bundle. Exit status 0: it agrees, 1: it differs, 2: it was refused."""
    parser = argparse.ArgumentParser(prog="replay.py", description=__doc__)
    parser.add_argument("--backend", required=True, choices=list(BACKENDS))
    parser.add_argument("--device", help="such as npu:1; default: the backend's first")
    parser.add_argument("--limit", type=int, help="compare this many prompts at most")
    parser.add_argument("--weights", type=Path, help="the weights, where they are not in the bundle")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--only", metavar="NAME", help="run one operation, on the recorded inputs")
    parser.add_argument("--prompt", help="the prompt of --only; default: the first")
    parser.add_argument(
        "--save", type=Path, help="with --only: write what is expected, found and before it here"
    )
    options = parser.parse_args(argv)
    try:
        bundle = Bundle(folder, weights=options.weights)
        adapter = get_adapter(options.backend, options.device)
        if options.only:
            prompt = options.prompt or str(bundle.prompts[0].name)
            found = isolate(bundle, adapter, prompt=prompt, name=options.only, save=options.save)
            print(json.dumps(found, indent=None if options.json else 1))
            return 1 if found["difference"]["wrong_rows"] else 0
        result = replay(bundle, adapter, limit=options.limit)
    except EaglejaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = json.dumps(result, allow_nan=False) if options.json else report.text(result)
    # Names of prompts may hold what a terminal cannot.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
    return 0 if result["agrees"] else 1
