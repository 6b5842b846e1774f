"""Which samples are trained on: duplicates out, evaluation texts out, sources mixed, long texts cut."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eaglejax.checkpoint.tokenizer import Tokenizer
from eaglejax.conversation import read_messages
from eaglejax.errors import ConfigError, RequestError
from eaglejax.jsonl import parse_object, read_lines
from eaglejax.train.samples import Report, Sample

NGRAM = 13
"""Length in words of a run of text that a training sample must not share with an evaluation prompt."""

_CJK = "㐀-䶿一-鿿぀-ヿ가-힯"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")


def words(text: str) -> list[str]:
    """Lower-case words; each Chinese, Japanese or Korean character is one. Spacing and punctuation do not
    count."""
    return _WORD.findall(text.lower())


def deduplicate(
    samples: Iterable[Sample], report: Report, *, by: Literal["sample", "prompt"] = "sample"
) -> list[Sample]:
    """The first of every group of samples with the same ids, or with the same prompt."""
    seen: set[bytes] = set()
    kept = []
    for sample in samples:
        ids = sample.ids if by == "sample" else sample.question
        digest = hashlib.sha256(ids.tobytes()).digest()
        if digest in seen:
            report.drop(f"a {by} like an earlier one", sample.name)
            continue
        seen.add(digest)
        kept.append(sample)
    return kept


class Contamination:
    """The evaluation texts that training data must not contain.

    A text matches when it shares a run of ``NGRAM`` words with one of them, or contains one that is shorter
    as a whole (if it has at least ``short`` words: shorter ones are everyday phrases).
    """

    def __init__(self, texts: Iterable[str], *, short: int = 6) -> None:
        self._runs: set[tuple[str, ...]] = set()
        self._short: dict[int, set[tuple[str, ...]]] = {}
        for text in texts:
            found = words(text)
            if len(found) >= NGRAM:
                self._runs |= set(_runs(found, NGRAM))
            elif len(found) >= short:
                self._short.setdefault(len(found), set()).add(tuple(found))

    def matches(self, text: str) -> bool:
        """Whether ``text`` shares what it must not."""
        found = words(text)
        if any(run in self._runs for run in _runs(found, NGRAM)):
            return True
        return any(run in known for length, known in self._short.items() for run in _runs(found, length))


def _runs(found: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return (tuple(found[i : i + length]) for i in range(len(found) - length + 1))


def evaluation_texts(path: str | Path) -> list[str]:
    """The prompts of an evaluation file (JSON Lines with ``turns``, ``prompt`` or ``messages``).

    Raises ConfigError for a file that cannot be read or a row without a prompt, so that nothing slips
    through.
    """
    texts: list[str] = []
    for number, line in read_lines(path):
        try:
            found = _prompts(parse_object(line))
        except (RequestError, TypeError) as error:
            raise ConfigError(f"{path}, line {number} is no prompt row: {error}") from error
        if not found:
            raise ConfigError(f"{path}, line {number} has neither turns nor prompt nor messages")
        texts.extend(found)
    return texts


def _prompts(row: Mapping[str, Any]) -> list[str]:
    turns = row.get("turns", [])
    if not isinstance(turns, list):
        # Read letter by letter, a text in the place of a list would match nothing.
        raise TypeError("its turns are no list")
    talk = read_messages(row["messages"]) if "messages" in row else ()
    asked = [m["content"] for m in talk if m["role"] == "user"]
    found = [*turns, *([row["prompt"]] if "prompt" in row else []), *asked]
    if not all(isinstance(text, str) for text in found):
        raise TypeError("its prompts are no texts")
    return found


def decontaminate(
    samples: Iterable[Sample], contamination: Contamination, tokenizer: Tokenizer, report: Report
) -> list[Sample]:
    """The samples whose text, prompt and answer alike, does not match."""
    kept = []
    for sample in samples:
        if contamination.matches(tokenizer.decode(sample.ids.tolist())):
            report.drop("shares text with an evaluation prompt", sample.name)
        else:
            kept.append(sample)
    return kept


def mix(
    sources: Mapping[str, Sequence[Sample]],
    weights: Mapping[str, float],
    *,
    seed: int,
    total: int | None = None,
) -> list[Sample]:
    """Samples of several sources in proportion to ``weights``, shuffled.

    ``total``: how many; None takes as many as the proportions allow without taking a sample twice. A source
    that is too small for its share is gone through again, each time in another order. The same seed gives the
    same mixture. Raises ConfigError for weights that name no source, are not positive, or ask of an empty
    source.
    """
    unknown = sorted(set(weights) ^ set(sources))
    if unknown:
        raise ConfigError(f"sources and weights differ in {', '.join(unknown)}")
    if any(w <= 0 for w in weights.values()):
        raise ConfigError(f"mixing weights must be positive: {dict(weights)}")
    empty = [name for name, samples in sources.items() if not samples]
    if empty or not sources:
        raise ConfigError(f"no samples in {', '.join(empty) or 'any source'}")
    share = {name: w / sum(weights.values()) for name, w in weights.items()}
    if total is None:
        # Not a sample less because a quotient is rounded down.
        total = int(min(len(sources[name]) / s for name, s in share.items()) + 1e-9)
    counts = {name: int(total * s) for name, s in share.items()}
    # The largest remainders get what whole numbers leave.
    behind = sorted(share, key=lambda name: (counts[name] - total * share[name], name))
    for name in behind[: total - sum(counts.values())]:
        counts[name] += 1
    rng = np.random.default_rng(seed)
    out: list[Sample] = []
    for name in sorted(sources):
        wanted, samples = counts[name], sources[name]
        while wanted > 0:
            order = rng.permutation(len(samples))[:wanted]
            out.extend(samples[i] for i in order)
            wanted -= len(order)
    return [out[i] for i in rng.permutation(len(out))]


def windows(sample: Sample, length: int, overlap: int) -> list[Sample]:
    """A sample of more than ``length`` tokens as windows of at most that many, ``overlap`` of them shared
    with the window before.

    A shared token is context the second time: of the overlap only the last token stays marked, since it is
    the input of the draft that predicts the first new one. So every pair (marked input, marked label) is
    trained in exactly one window as long as ``overlap`` is at least the number of chain steps plus one.
    Windows without supervised tokens are left out. Raises ConfigError unless 1 <= overlap < length.
    """
    if not 1 <= overlap < length:
        raise ConfigError(f"an overlap of {overlap} does not fit windows of {length} tokens")
    if len(sample) <= length:
        return [sample]
    out = []
    for start in range(0, len(sample) - overlap, length - overlap):
        marks = sample.supervised[start : start + length].copy()
        if start:
            marks[: overlap - 1] = False
        name = f"{sample.name}, tokens {start}-{start + len(marks) - 1}"
        if marks[overlap if start else 0 :].any():
            out.append(Sample(sample.ids[start : start + length], marks, name))
    return out


def split_validation(samples: Sequence[Sample], share: float) -> tuple[list[Sample], list[Sample]]:
    """(training, validation): about ``share`` of the samples are held out, chosen by the hash of their
    conversation's first prompt, so that the same prompt is always on the same side, whatever else is in the
    data, and no turn is trained on whose earlier turns are held out."""
    if not 0 <= share < 1:
        raise ConfigError(f"the validation share is {share}; it must lie in [0, 1)")
    train: list[Sample] = []
    held: list[Sample] = []
    for sample in samples:
        (held if place(sample) < share else train).append(sample)
    return train, held


def place(sample: Sample) -> float:
    """Where the hash of its conversation puts a sample in [0, 1): those below a validation share are held
    out."""
    return int(sample.group[:16], 16) / 2**64
