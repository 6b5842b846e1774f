"""``generate`` as a notebook calls it: what may be given, what comes back, what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from loop_tools import prompts, tiny_target

import eaglejax as ej
from eaglejax.api import encode_prompt
from eaglejax.conversation import Conversation
from eaglejax.errors import ConfigError, RequestError

LOOKUP = ej.NGram(length=2)


def generate(given: Any, **options: Any) -> Any:
    # One batch and length, so that the file compiles one program a proposer.
    return ej.generate(tiny_target(), given, max_new_tokens=6, batch_size=3, **options)


def test_lists_arrays_and_single_prompts_give_the_same_text() -> None:
    rows = [list(p) for p in prompts()[:3]]
    many = generate(rows)
    assert [r.token_ids for r in generate([np.asarray(p) for p in rows])] == [r.token_ids for r in many]
    assert [r.token_ids for r in generate(rows, proposer=LOOKUP)] == [r.token_ids for r in many]
    one = ej.generate(tiny_target(), np.asarray(rows[0], np.int64), max_new_tokens=6)
    assert one.token_ids == many[0].token_ids
    assert one.finish_reason == many[0].finish_reason


def test_one_bad_prompt_does_not_cost_the_others() -> None:
    rows = [list(prompts()[0]), [], list(prompts()[1])]
    results = generate(rows, on_error="return")
    assert "empty" in results[1].error
    assert [r.token_ids for r in results[::2]] == [r.token_ids for r in generate(rows[::2])]
    with pytest.raises(RequestError, match="empty"):
        generate(rows)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"stop": None}, "stop is None"),
        ({"on_error": "ignore"}, "on_error"),
        ({"proposer": "ngram"}, "proposer is 'ngram'"),
        ({"proposer": ej.NGram}, "give an object"),
        ({"verification": "typical"}, "verification"),
        ({"sampling": [ej.Sampling()] * 2}, "2 entries for 1 prompts"),
        ({"predictions": [[1, 2]]}, "does not use them"),
        ({"stop": ["x"]}, "tokenizer"),
        ({"stop_token_ids": 7}, "stop_token_ids is 7"),
        ({"stop_token_ids": [[1], [2]]}, "one list for each prompt"),
        ({"chat_template_kwargs": "think"}, "chat_template_kwargs has 5 entries"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ej.generate(tiny_target(), [[1, 2, 3]], max_new_tokens=2, **options)


def test_every_prompt_has_stop_tokens_of_its_own() -> None:
    plain = generate([[1, 2, 3], [1, 2, 3]])
    token = plain[0].token_ids[1]
    first, second = generate([[1, 2, 3], [1, 2, 3]], stop_token_ids=[[token], []])
    at = plain[0].token_ids.index(token) + 1
    assert (first.token_ids, first.finish_reason) == (plain[0].token_ids[:at], "stop")
    assert second.token_ids == plain[1].token_ids
    assert generate([[1, 2, 3]], stop_token_ids=[token])[0].token_ids == first.token_ids


@pytest.mark.parametrize("given", [7, {"role": "user"}, [[True, False]], [[1.5]], [{"role": 1}], "text"])
def test_prompts_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(RequestError):
        ej.generate(tiny_target(), given, max_new_tokens=2)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_no_door_lets_a_variable_take_a_reserved_name(name: str) -> None:
    """Neither as an argument nor inside a Conversation, which anybody may build."""
    message = {"role": "user", "content": "x"}
    target = tiny_target()
    for prompt, variables in (([message], {name: []}), (Conversation((message,), {name: []}), None)):
        with pytest.raises(RequestError, match="no variable to be set"):
            encode_prompt(target, prompt, variables)
    with pytest.raises(RequestError, match="tools are a list of objects"):
        encode_prompt(target, Conversation((message,), {"tools": "x"}))
