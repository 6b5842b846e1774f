"""Which tokens of a conversation the target would have written, by the borders of its own chat template.

For each assistant turn the template is rendered twice: the history with the generation prompt (what serving
sends) and the history with the answer. What the second has more is the answer. No pattern is searched in the
text, so no template needs registering, and training rows are exactly the ids of serving followed by the ids
of the answer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from eaglejax.checkpoint.tokenizer import Tokenizer
from eaglejax.errors import RequestError

_MARK = "\ue000answer\ue001"
"""A text of private characters, which no answer holds."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """``ids`` of a conversation and, for each, whether the target wrote it."""

    ids: list[int]
    supervised: list[bool]


def render_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Any = None,
    **variables: Any,
) -> list[Rendered]:
    """The training rows of a conversation.

    One row with every assistant turn supervised where each turn's rendering is the beginning of the next
    one's; else one row a turn, since the template rewrites history (drops earlier reasoning, say) and a joint
    row would hold texts that serving never sees. A turn's end token is supervised, what the template puts
    behind it is not. Raises RequestError when the template rejects it, when there is no
    assistant turn, or when an answer cannot be found behind its prompt.
    """
    turns = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    if not turns:
        raise RequestError("nothing is supervised; the conversation has no assistant turn")
    if tools is not None:
        variables["tools"] = tools
    rows = [_turn(tokenizer, messages, n, variables) for n in turns]
    for earlier, later in itertools.pairwise(rows):
        if later.ids[: len(earlier.ids)] != earlier.ids:
            return rows
    supervised = [False] * len(rows[-1].ids)
    for row in rows:
        for n, marked in enumerate(row.supervised):
            supervised[n] |= marked
    return [Rendered(rows[-1].ids, supervised)]


def _turn(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    turn: int,
    variables: Mapping[str, Any],
) -> Rendered:
    """The row that ends with the answer ``messages[turn]``, only that answer supervised."""
    prompt = tokenizer.render_chat(messages[:turn], add_generation_prompt=True, **variables)
    whole = tokenizer.render_chat(messages[: turn + 1], add_generation_prompt=False, **variables)
    served = prompt
    if not whole.startswith(prompt):
        history = tokenizer.render_chat(messages[:turn], add_generation_prompt=False, **variables)
        if not whole.startswith(history):
            raise RequestError(
                f"the template renders the history of turn {turn} differently once it is "
                "answered, so that the answer cannot be told from the prompt"
            )
        prompt = _common(prompt, whole)
    answer = str(messages[turn]["content"])
    at = len(prompt)
    if answer.strip() and not (messages[turn].get("reasoning_content") or messages[turn].get("tool_calls")):
        # What a template writes in front of the answer (an empty reasoning block, say) is not the target's.
        opening = _opening(tokenizer, messages, turn, prompt, whole, variables)
        # Templates may trim it.
        at = whole.find(answer if answer in whole[opening:] else answer.strip(), opening)
    if at < 0:
        raise RequestError(f"the template changes the text of turn {turn}; its answer is not found")
    ids, before = (_encode(tokenizer, text, served) for text in (whole, whole[:at]))
    start = len(_common(before, ids))
    end = _end(ids, start, tokenizer.eos_ids)
    if end == start:
        raise RequestError(f"nothing is supervised; turn {turn} is empty")
    return Rendered(ids[:end], [start <= n < end for n in range(end)])


def _encode(tokenizer: Tokenizer, text: str, served: str) -> list[int]:
    """Ids of ``text``, beginning with those of ``served``, as serving sends them, where it begins with that.

    Encoded together, what follows may merge with it (line ends do). Where a tokenizer cannot go on with the
    rest of a text, which decoding shows, the ids are those of both together.
    """
    ids = tokenizer.encode(text, special=False)
    if not text.startswith(served):
        return ids
    front = tokenizer.encode(served, special=False)
    if ids[: len(front)] == front:
        return ids
    apart = front + tokenizer.encode(text[len(served) :], special=False)
    return apart if tokenizer.decode(apart) == tokenizer.decode(ids) else ids


def _opening(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    turn: int,
    prompt: str,
    whole: str,
    variables: Mapping[str, Any],
) -> int:
    """Characters of ``whole`` in front of the answer. An answer such as "think" may occur in what the
    template itself writes there, so a text that occurs nowhere is rendered in its place."""
    marked = [*messages[:turn], {**messages[turn], "content": _MARK}]
    found = tokenizer.render_chat(marked, add_generation_prompt=False, **variables)
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
