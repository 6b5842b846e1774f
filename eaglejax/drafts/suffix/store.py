"""What was answered, kept on the host within bounds, and the texts of it that a request may repeat."""

from __future__ import annotations

import array
import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from eaglejax.drafts.base import Request

MOST_TOKENS = 1 << 20
"""Tokens that a store holds, whatever the number of its texts."""
_GRAM = 3
_PROMPT_TAIL = 1024  # of a prompt, what says which texts are like it
_OPEN = 1024  # answers that may still grow


@dataclasses.dataclass(eq=False)
class _Text:
    """``prompt``: the end of what was asked; ``tokens``: what was answered so far; ``grams``: hashes of both
    texts' sequences of three tokens, made when they are asked for (None: not yet)."""

    prompt: np.ndarray
    tokens: array.array[int]
    grams: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.prompt = self.prompt[-_PROMPT_TAIL:]

    def known_grams(self) -> np.ndarray:
        if self.grams is None:
            both = [_hashes(self.prompt), _hashes(np.asarray(self.tokens, np.int64))]
            self.grams = np.unique(np.concatenate(both))
        return self.grams


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """[T - 2] uint64, one for each three tokens in a row."""
    found = np.zeros(max(len(tokens) - _GRAM + 1, 0), np.uint64)
    for i in range(_GRAM):
        part = tokens[i : i + len(found)].astype(np.uint64)
        found = found * np.uint64(0x9E3779B97F4A7C15) + part
        found ^= found >> np.uint64(29)
    return found


class Store:
    """The answers of past requests, at most ``requests`` of them and ``tokens`` tokens; the oldest go first.

    Not for several threads at once.
    """

    def __init__(self, requests: int, tokens: int = MOST_TOKENS) -> None:
        self.requests, self.tokens = requests, tokens
        self._texts: collections.deque[_Text] = collections.deque()
        # By the request object, which is held here, so that no other can come to stand at its address.
        self._open: collections.OrderedDict[int, tuple[Request, _Text]] = collections.OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """Texts that it holds."""
        return len(self._texts)

    @property
    def size(self) -> int:
        """Tokens that it holds."""
        return self._size

    def learn(self, request: Request, tokens: Sequence[int]) -> None:
        """``tokens`` are the next of the answer to ``request``, the very object of earlier calls."""
        if not self.requests or not tokens:
            return
        key = id(request)
        if key not in self._open:
            text = _Text(np.asarray(request.prompt[-_PROMPT_TAIL:], np.int64), array.array("i"))
            self._texts.append(text)
            self._open[key] = (request, text)
        text = self._open[key][1]
        # An answer longer than the store keeps its beginning; the newest text is never the one that goes.
        room = max(self.tokens - len(text.tokens), 0)
        text.tokens.extend(int(t) for t in tokens[:room])
        text.grams = None
        self._size += min(len(tokens), room)
        self._open.move_to_end(key)
        while len(self._open) > _OPEN:
            self._open.popitem(last=False)
        self._forget()

    def add(self, tokens: Sequence[int], prompt: Sequence[int] = ()) -> None:
        """Learn a whole text that was not answered here."""
        if not self.requests or not len(tokens):
            return
        kept = array.array("i", [int(t) for t in tokens[: self.tokens]])
        self._texts.append(_Text(np.asarray(prompt, np.int64), kept))
        self._size += len(kept)
        self._forget()

    def _forget(self) -> None:
        while len(self._texts) > 1 and (len(self._texts) > self.requests or self._size > self.tokens):
            gone = self._texts.popleft()
            self._size -= len(gone.tokens)
            for key, (_, text) in list(self._open.items()):
                if text is gone:
                    del self._open[key]

    def alike(self, prompt: Sequence[int], room: int) -> list[np.ndarray]:
        """Texts of ``room`` tokens together at the most, oldest first, int32.

        All where there is room for all; else those that share most sequences of three tokens with
        ``prompt``, of equals the latest; the last that fits may lose its end.
        """
        texts = [text for text in self._texts if text.tokens]
        order = np.arange(len(texts))[::-1]
        if self._size > room:
            wanted = np.unique(_hashes(np.asarray(prompt[-_PROMPT_TAIL:], np.int64)))
            parts = [text.known_grams() for text in texts]
            hit = np.isin(np.concatenate(parts), wanted, assume_unique=False)
            ends = np.cumsum([len(part) for part in parts])
            sums = np.concatenate([[0], np.cumsum(hit)])
            shared = sums[ends] - sums[ends - [len(part) for part in parts]]
            order = order[np.argsort(-shared[order], kind="stable")]
        chosen: dict[int, np.ndarray] = {}
        for i in order:
            if room <= 0:
                break
            chosen[int(i)] = np.asarray(texts[i].tokens[:room], np.int32)
            room -= len(chosen[int(i)])
        return [chosen[i] for i in sorted(chosen)]
