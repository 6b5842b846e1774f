"""Which tokens of a conversation the target would have written, by the borders of its own chat template.

For each assistant turn the template is rendered twice: the history with the generation prompt (what serving
sends) and the history with the answer. What the second has more is the answer. No pattern is searched in the
text, so no template needs registering, and training rows are exactly the ids of serving followed by the ids
of the answer. Where no such row can be made (the generation prompt opens a reasoning block that the rendered
answer lacks, say), there is none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from eaglejax.checkpoint.tokenizer import Tokenizer
from eaglejax.conversation import Conversation
from eaglejax.errors import RequestError

_MARK = "\ue000answer\ue001"
"""A text of private characters, which no answer holds."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """``ids`` of a conversation and, for each, whether the target wrote it."""

    ids: list[int]
    supervised: list[bool]


class NotServed(RequestError):
    """An answer stands behind another context than the one that serving would send."""


def render_conversation(tokenizer: Tokenizer, conversation: Conversation) -> list[Rendered]:
    """The training rows of a conversation.

    One row with every assistant turn supervised where each turn's rendering is the beginning of the next
    one's; else one row a turn, since the template rewrites history (drops earlier reasoning, say) and a joint
    row would hold texts that serving never sees. A turn's end token is supervised, what the template puts
    behind it is not. Raises RequestError when the template rejects it, when there is no
    assistant turn, or when an answer cannot be found behind its prompt; NotServed when a row would not begin
    with the ids that serving sends.
    """
    turns = [n for n, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    if not turns:
        raise RequestError("nothing is supervised; the conversation has no assistant turn")
    rows = [_turn(tokenizer, conversation, n) for n in turns]
    for earlier, later in itertools.pairwise(rows):
        if later.ids[: len(earlier.ids)] != earlier.ids:
            return rows
    supervised = [False] * len(rows[-1].ids)
    for row in rows:
        for n, marked in enumerate(row.supervised):
            supervised[n] |= marked
    return [Rendered(rows[-1].ids, supervised)]


def _turn(tokenizer: Tokenizer, conversation: Conversation, turn: int) -> Rendered:
    """The row that ends with the answer ``messages[turn]``, only that answer supervised."""
    message = conversation.messages[turn]
    prompt = tokenizer.render(conversation.first(turn))
    whole = tokenizer.render(conversation.first(turn + 1), add_generation_prompt=False)
    if not whole.startswith(prompt):
        raise NotServed(
            f"the template renders turn {turn} behind another text than serving sends, which ends in "
            f"{prompt[-24:]!r}; let the target answer such prompts (`eaglejax regenerate`)"
        )
    answer = message["content"]
    at = len(prompt)
    if answer.strip() and not (message.get("reasoning_content") or message.get("tool_calls")):
        # What a template writes in front of the answer (an empty reasoning block, say) is not the target's.
        opening = _opening(tokenizer, conversation, turn, prompt, whole)
        # Templates may trim it.
        at = whole.find(answer if answer in whole[opening:] else answer.strip(), opening)
    if at < 0:
        raise RequestError(f"the template changes the text of turn {turn}; its answer is not found")
    served = tokenizer.encode(prompt, special=False)
    ids, before = (_encode(tokenizer, text, prompt, served) for text in (whole, whole[:at]))
    start = len(_common(before, ids))
    end = _end(ids, start, tokenizer.eos_ids)
    if end == start:
        raise RequestError(f"nothing is supervised; turn {turn} is empty")
    return Rendered(ids[:end], [start <= n < end for n in range(end)])


def _encode(tokenizer: Tokenizer, text: str, prompt: str, served: list[int]) -> list[int]:
    """Ids of ``text``, which begins with ``prompt``, beginning with the ids ``served`` of that.

    Encoded together, what follows may merge with it (line ends do), so that the two are put together from
    their own ids. Raises NotServed where that is another text.
    """
    ids = tokenizer.encode(text, special=False)
    if ids[: len(served)] == served:
        return ids
    rest = text[len(prompt) :]
    # Some tokenizers put a space before a text; behind a line end there is none.
    line, both = (tokenizer.encode(t, special=False) for t in ("\n", "\n" + rest))
    candidates = [tokenizer.encode(rest, special=False)]
    if both[: len(line)] == line:
        candidates.append(both[len(line) :])
    for behind in candidates:
        if tokenizer.decode(served + behind) == tokenizer.decode(ids):
            return served + behind
    raise NotServed(
        f"the tokenizer cannot go on from the prompt that serving sends, which ends in {prompt[-24:]!r}"
    )


def _opening(tokenizer: Tokenizer, conversation: Conversation, turn: int, prompt: str, whole: str) -> int:
    """Characters of ``whole`` in front of the answer. An answer such as "think" may occur in what the
    template itself writes there, so a text that occurs nowhere is rendered in its place."""
    marked = {**conversation.messages[turn], "content": _MARK}
    found = tokenizer.render(conversation.first(turn).then(marked), add_generation_prompt=False)
    before, mark, _ = found.partition(_MARK)
    return max(len(prompt), len(before)) if mark and whole.startswith(before) else len(prompt)


def _end(ids: Sequence[int], start: int, eos_ids: Sequence[int]) -> int:
    """One past the first end token from ``start`` on, or the whole length."""
    for n in range(start, len(ids)):
        if ids[n] in eos_ids:
            return n + 1
    return len(ids)


def _common(a: Any, b: Any) -> Any:
    """The longest common beginning."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]
