"""Writing a parity bundle while the JAX run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from eaglejax.devices import machine
from eaglejax.errors import ConfigError
from eaglejax.interop.models.runner import TorchDraft, TorchTarget
from eaglejax.interop.parity.blob import BlobWriter, sha256, write_blob
from eaglejax.interop.parity.bundle import FORMAT, VERSION, StageWriter, describe_files, write_manifest
from eaglejax.interop.parity.check import Prompt
from eaglejax.interop.parity.compare import Stage
from eaglejax.interop.parity.weights import write_models
from eaglejax.interop.portable import write_sources

MIB = 2**20

SCRIPT = '''"""Compares this machine with the recorded JAX run: python replay.py --backend ascend."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "code"))

from eaglejax.interop.parity.replay import main  # noqa: E402

sys.exit(main(HERE))
'''


@dataclasses.dataclass(frozen=True)
class Options:
    """How a bundle is written.

    ``rounds``: first rounds of each prompt that are recorded with all intermediate tensors. ``budget``: bytes
    of recorded tensors, about. ``weights``: a file that the weights go to, for several bundles to refer to by
    hash (None: into the bundle). Raises ConfigError.
    """

    rounds: int = 2
    budget: int = 256 * MIB
    weights: Path | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "budget"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} of a recording is {getattr(self, name)}; it must be 0 or more")


class Recorder:
    """Takes in stages as they are computed. Use :func:`recording`."""

    def __init__(self, blob: BlobWriter, options: Options) -> None:
        self._stages = StageWriter(blob, budget=options.budget, rounds=options.rounds)
        self.prompts: list[dict[str, Any]] = []

    def tee(self, prompt: Prompt, stages: Iterable[Stage]) -> Iterator[Stage]:
        """The same stages, written on their way."""
        number = len(self.prompts)
        entries: list[dict[str, Any]] = []
        self.prompts.append(
            {"id": prompt.name, "tokens": list(prompt.tokens), "budget": prompt.budget, "stages": entries}
        )
        for stage in stages:
            entries.append(self._stages.add(number, stage))
            yield stage


@contextlib.contextmanager
def recording(
    out: Path,
    target: TorchTarget,
    draft: TorchDraft,
    *,
    names: tuple[str, str],
    dtype: str,
    eos_ids: tuple[int, ...],
    options: Options = Options(),
) -> Iterator[Recorder]:
    """A bundle at ``out`` (a new folder, or a ``.zip``) of what the body records, written when it is through.

    ``names``: what target and draft are called. Raises ConfigError where ``out`` exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists; name a new folder or .zip for the recording")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the result, so that finishing is a rename.
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    folder.chmod(0o755)
    try:
        with write_blob(folder / "records.bin") as blob:
            recorder = Recorder(blob, options)
            yield recorder
        models, weights = _write_weights(folder, target, draft, options)
        script = folder / "replay.py"
        script.write_text(SCRIPT, encoding="utf-8")
        sources = [script, *write_sources(folder / "code")]
        write_manifest(
            folder,
            {
                "format": FORMAT,
                "version": VERSION,
                "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "eaglejax": metadata.version("eaglejax"),
                "machine": machine.describe(),
                "names": {"target": names[0], "draft": names[1]},
                "models": {"dtype": dtype, **models},
                "weights": weights,
                "records": blob.describe(),
                "files": describe_files(folder, sources),
                "eos_ids": list(eos_ids),
                "options": {"rounds": options.rounds, "budget_bytes": options.budget},
                "prompts": recorder.prompts,
            },
        )
        _finish(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_weights(
    folder: Path, target: TorchTarget, draft: TorchDraft, options: Options
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(description of the models, of the file with their weights)."""
    with write_blob(folder / "weights.bin") as blob:
        models = write_models(blob, target, draft)
    described = {**blob.describe(), "embedded": options.weights is None}
    if options.weights is not None:
        if options.weights.exists() and sha256(options.weights) != described["sha256"]:
            raise ConfigError(f"{options.weights} exists and holds other weights; name another file")
        options.weights.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / "weights.bin", options.weights)
    return models, described


def _finish(folder: Path, out: Path) -> None:
    """Turn the finished folder into ``out``."""
    if out.suffix != ".zip":
        folder.rename(out)
        return
    archive = shutil.make_archive(str(folder), "zip", folder)
    Path(archive).rename(out)
