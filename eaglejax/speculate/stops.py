"""Turning tokens into text as they come, and stop strings.

Text grows token by token; a token may end inside a character, so text is handed out only when it can no
longer change. Stop strings are looked for in the text, across token and round borders, one token at a time,
so that the output ends where autoregressive decoding would have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decodes(Protocol):
    """The part of a tokenizer that is needed here. ``special_ids``: control tokens, which have no text."""

    @property
    def special_ids(self) -> Collection[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """Text of a growing token list.

    Decodes a short window that starts at a token border where text was complete, so that the cost of a token
    does not grow with the text and word-initial spaces survive. Control tokens and the ids ``hidden`` (ends
    of text) add no text.
    """

    def __init__(
        self, tokenizer: Decodes, stop: Sequence[str] = (), hidden: Collection[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset(tokenizer.special_ids) | frozenset(hidden)
        self._stop = tuple(stop)
        self._ids: list[int] = []  # those that have text
        self._window = 0  # first token of the window
        self._done = 0  # tokens whose text is settled
        self._settled = ""
        self._open = ""  # certain text of the tokens since, before an unfinished character
        self._ends: list[int] = []  # certain characters after each token, hidden ones included
        self.stopped_at: int | None = None  # characters of text before the stop string

    def push(self, token: int) -> bool:
        """Add a token; True when its text completes a stop string."""
        old = self._certain
        if token in self._hidden:
            self._ends.append(len(old))
            return False
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._window : self._done])
        after = self._tokenizer.decode(self._ids[self._window :])
        fresh = after[len(before) :]
        if after.endswith(REPLACEMENT) and len(self._ids) - self._done < 8:
            # An unfinished character; no encoding needs more tokens than this, so longer runs are real text.
            self._open = fresh.rstrip(REPLACEMENT)
        else:
            self._settled += fresh
            self._open = ""
            self._window, self._done = self._done, len(self._ids)
        self._ends.append(len(self._certain))
        return self._find_stop(len(old))

    @property
    def _certain(self) -> str:
        """Text that no later token changes."""
        return self._settled + self._open if self._open else self._settled

    def _find_stop(self, old: int) -> bool:
        found, text = [], self._certain
        for s in self._stop:
            at = text.find(s, max(0, old - len(s) + 1))
            if at >= 0:
                found.append(at)
        if found:
            self.stopped_at = min(found)
        return bool(found)

    @property
    def safe_text(self) -> str:
        """Text that will not change any more: nothing that may turn out to be a stop string's beginning."""
        certain = self._certain
        if self.stopped_at is not None:
            return certain[: self.stopped_at]
        hold = 0
        for s in self._stop:
            for n in range(min(len(s) - 1, len(certain)), 0, -1):
                if certain.endswith(s[:n]):
                    hold = max(hold, n)
                    break
        return certain[: len(certain) - hold]

    @property
    def text(self) -> str:
        """The whole text, an unfinished character at the end included (as replacement characters)."""
        if self.stopped_at is not None:
            return self._certain[: self.stopped_at]
        before = self._tokenizer.decode(self._ids[self._window : self._done])
        return self._settled + self._tokenizer.decode(self._ids[self._window :])[len(before) :]

    def kept_tokens(self) -> int:
        """Tokens the text needs: the shortest prefix that covers what stands before the stop string."""
        if self.stopped_at is None:
            return len(self._ends)
        if self.stopped_at == 0:
            return 0
        return next(i + 1 for i, end in enumerate(self._ends) if end >= self.stopped_at)
