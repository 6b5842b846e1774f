"""Turning tokens into text as they come, and stop strings.

Text grows token by token; a token may end inside a character, so text is handed out only when it can no
longer change. Stop strings are looked for in the text, across token and round borders, one token at a time,
so that the output ends where autoregressive decoding would have ended. Control tokens have no text, but a
stop string may name them: there they count as they are spelled.
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
    of text) add no text; those that a stop string spells are kept in the text that is searched, and cut out
    of what is handed out.
    """

    def __init__(
        self, tokenizer: Decodes, stop: Sequence[str] = (), hidden: Collection[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset(tokenizer.special_ids) | frozenset(hidden)
        self._stop = tuple(stop)
        spelled = {i: tokenizer.decode([i]) for i in tokenizer.special_ids} if stop else {}
        self._spelled = {i: t for i, t in spelled.items() if t and any(t in s for s in self._stop)}
        self._marks: list[tuple[int, int]] = []  # where control tokens stand in the searched text
        self._ids: list[int] = []  # those that have text
        self._window = 0  # first token of the window
        self._done = 0  # tokens whose text is settled
        self._settled = ""
        self._open = ""  # certain text of the tokens since, before an unfinished character
        self._ends: list[int] = []  # certain characters after each token, hidden ones included
        self.stopped_at: int | None = None  # characters of searched text before the stop string

    def push(self, token: int) -> bool:
        """Add a token; True when its text completes a stop string."""
        old = len(self._certain)
        if token in self._spelled:
            self._settle(self._fresh())
            begin = len(self._settled)
            if self._ends:
                self._ends[-1] = begin  # a character that was unfinished ends there
            self._settled += self._spelled[token]
            self._marks.append((begin, len(self._settled)))
        elif token in self._hidden:
            self._ends.append(old)
            return False
        else:
            self._ids.append(token)
            fresh = self._fresh()
            if fresh.endswith(REPLACEMENT) and len(self._ids) - self._done < 8:
                # An unfinished character; no encoding needs more tokens than this, so longer runs are real
                # text.
                self._open = fresh.rstrip(REPLACEMENT)
            else:
                self._settle(fresh)
        self._ends.append(len(self._certain))
        return self._find_stop(old)

    def _fresh(self) -> str:
        """Text of the tokens since the last that is settled."""
        before = self._tokenizer.decode(self._ids[self._window : self._done])
        return self._tokenizer.decode(self._ids[self._window :])[len(before) :]

    def _settle(self, fresh: str) -> None:
        self._settled += fresh
        self._open = ""
        if len(self._ids) > self._done:
            self._window, self._done = self._done, len(self._ids)

    @property
    def _certain(self) -> str:
        """Searched text that no later token changes."""
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

    def _shown(self, text: str) -> str:
        """``text``, a beginning of the searched text, without its control tokens."""
        for begin, end in reversed(self._marks):
            text = text[:begin] + text[end:]
        return text

    @property
    def safe_text(self) -> str:
        """Text that will not change any more: nothing that may turn out to be a stop string's beginning."""
        certain = self._certain
        if self.stopped_at is not None:
            return self._shown(certain[: self.stopped_at])
        hold = 0
        for s in self._stop:
            for n in range(min(len(s) - 1, len(certain)), 0, -1):
                if certain.endswith(s[:n]):
                    hold = max(hold, n)
                    break
        return self._shown(certain[: len(certain) - hold])

    @property
    def text(self) -> str:
        """The whole text, an unfinished character at the end included (as replacement characters)."""
        if self.stopped_at is not None:
            return self._shown(self._certain[: self.stopped_at])
        return self._shown(self._settled + self._fresh())

    def kept_tokens(self) -> int:
        """Tokens the text needs: the shortest prefix that covers what stands before the stop string."""
        if self.stopped_at is None:
            return len(self._ends)
        if self.stopped_at == 0:
            return 0
        return next(i + 1 for i, end in enumerate(self._ends) if end >= self.stopped_at)
