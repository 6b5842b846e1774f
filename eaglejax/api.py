"""What a notebook imports: ``load_target``, ``generate``, ``stream``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack, overload

import numpy as np

from eaglejax.conversation import Conversation, as_conversation, template_variables
from eaglejax.drafts.base import Bound, Proposer, Request
from eaglejax.errors import ConfigError, EaglejaxError, RequestError
from eaglejax.models.target import Target
from eaglejax.sampling import Sampling
from eaglejax.speculate.admission import bound_for, check_request
from eaglejax.speculate.books import Generation, Piece
from eaglejax.speculate.chance import watch
from eaglejax.speculate.generate import BatchDecoder
from eaglejax.speculate.metrics import Stats
from eaglejax.speculate.options import DecodeChanges, DecodeOptions

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages | Conversation

DEFAULT_BATCH = 8
STREAMING = DecodeOptions(rounds_a_chunk=4)
INTEGERS = (int, np.integer)


class Settings(DecodeChanges, total=False):
    """Keywords of :func:`generate`."""

    proposer: Proposer | Bound | None
    sampling: Sampling | Sequence[Sampling] | None
    max_new_tokens: int | Sequence[int]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]]
    chat_template_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    predictions: Any
    batch_size: int
    on_error: str
    options: DecodeOptions | None


def _is_single(prompts: Any) -> bool:
    """A text, one token list or one conversation, rather than a list of them."""
    if isinstance(prompts, str | Conversation):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts are {type(prompts).__name__}; give a text, token ids, messages, or a list of such"
        )
    return len(prompts) > 0 and isinstance(prompts[0], (Mapping, *INTEGERS))


def _is_token(value: Any) -> bool:
    return isinstance(value, INTEGERS) and not isinstance(value, bool)


def encode_prompt(
    target: Target,
    prompt: Any,
    variables: Mapping[str, Any] | None = None,
    *,
    split_special_tokens: bool = False,
) -> tuple[int, ...]:
    """Token ids of a text (with the model's own leading tokens), of a conversation or its messages (through
    the target's chat template, ready for the answer), or of ids (as they are).

    ``variables``: what the template is to read where the conversation does not set it itself.
    ``split_special_tokens``: control tokens that the text or conversation spells are text. Raises
    RequestError for anything else, and for variables without a template to read them.
    """
    variables = template_variables(variables or {})
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    several = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    if isinstance(prompt, Conversation) or (several and all(isinstance(m, Mapping) for m in prompt)):
        conversation = as_conversation(prompt).with_defaults(variables)
        return tuple(
            target.need_tokenizer().encode_conversation(
                conversation, split_special_tokens=split_special_tokens
            )
        )
    if variables:
        raise RequestError(
            f"{', '.join(map(repr, variables))}: the chat template alone reads chat_template_kwargs; give "
            "messages instead of a text or token ids"
        )
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("the prompt is empty; give some text")
        return tuple(target.need_tokenizer().encode(prompt, split_special_tokens=split_special_tokens))
    if isinstance(prompt, Sequence) and all(_is_token(t) for t in prompt):
        return tuple(int(t) for t in prompt)
    raise RequestError(
        f"a prompt is a text, a list of token ids or a list of messages, not {type(prompt).__name__}"
    )


def _per_prompt(name: str, value: Any, kind: type | tuple[type, ...], count: int) -> list[Any]:
    """``value`` once a prompt: one for all, or a list of the same length."""
    if value is None or isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence):
        raise ConfigError(f"{name} is {value!r}; give one value, or a list of one each")
    values = list(value)
    if len(values) != count:
        raise ConfigError(f"{name} has {len(values)} entries for {count} prompts; give one, or one each")
    return values


def failed(error: str) -> Generation:
    """What stands for a prompt that cannot be served."""
    return Generation("", [], "error", None, Stats(), 0, error)


def decoder_for(
    target: Target,
    proposer: Proposer | Bound | None,
    requests: Sequence[Request],
    batch: int,
    options: DecodeOptions,
) -> BatchDecoder:
    """What decodes ``requests``, up to ``batch`` rows at once; ``proposer`` None is plain decoding.

    Raises ConfigError for predictions that the proposer does not use, and MismatchError for an EAGLE draft in
    another basis than the target's.
    """
    bound = bound_for(target, proposer)
    return BatchDecoder(target, bound.proposer, bound.params, requests, batch=batch, options=options)


@overload
def generate(  # type: ignore[overload-overlap]
    target: Target, prompts: Prompt, **settings: Unpack[Settings]
) -> Generation: ...


@overload
def generate(target: Target, prompts: Sequence[Prompt], **settings: Unpack[Settings]) -> list[Generation]: ...


def generate(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    *,
    proposer: Proposer | Bound | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    max_new_tokens: int | Sequence[int] = 256,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]] = (),
    chat_template_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    split_special_tokens: bool = False,
    predictions: Any = None,
    batch_size: int = DEFAULT_BATCH,
    on_error: str = "raise",
    options: DecodeOptions | None = None,
    **changes: Unpack[DecodeChanges],
) -> Generation | list[Generation]:
    """Decode prompts; the output's distribution is the target's whatever the proposer.

    ``prompts``: a text, token ids, messages or a ``Conversation`` (one Generation comes back), or a list of
    such (a list comes back). ``proposer``: who guesses (None: plain autoregressive decoding). ``sampling``:
    one for all, or one each; None is greedy. A row's draws depend on its own seed alone. ``stop``: strings
    before which an answer ends; control tokens may be spelled in them. ``stop_token_ids``: ids that end an
    answer as the end of text does, one list for all or one each. ``chat_template_kwargs``: what the chat
    template reads beside the messages (``{"enable_thinking": False}``, ``{"tools": [...]}``), one for all or
    one each. ``predictions``: text or token ids that each answer will mostly repeat, for proposers that use
    them. ``batch_size``: rows decoded together. ``on_error``: "raise", or "return" a Generation whose
    ``error`` says why, so that one bad prompt does not cost the others. ``options``: how to decode, see
    ``DecodeOptions``; its fields can be given as keywords too (``logprobs=True``), which go before it. Raises
    ConfigError for options that cannot be and RequestError for a prompt that cannot be served.
    """
    if on_error not in ("raise", "return"):
        raise ConfigError(f"on_error is {on_error!r}; it is 'raise' or 'return'")
    if not _is_token(batch_size) or batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size!r:.80}; it must be a whole number of at least 1")
    options = dataclasses.replace(options or DecodeOptions(), **changes)
    single = _is_single(prompts)
    items: list[Any] = [prompts] if single else list(prompts)  # type: ignore[arg-type]
    results: dict[int, Generation] = {}
    good: list[tuple[int, Request]] = []
    for n, request in enumerate(
        _requests(
            target,
            items,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            stop=stop,
            stop_token_ids=stop_token_ids,
            chat_template_kwargs=chat_template_kwargs,
            split_special_tokens=split_special_tokens,
            predictions=predictions,
        )
    ):
        if isinstance(request, Request):
            good.append((n, request))
        elif on_error == "raise":
            raise request
        else:
            results[n] = failed(str(request))
    for begin in range(0, len(good), batch_size):
        group = good[begin : begin + batch_size]
        decoder = decoder_for(target, proposer, [r for _, r in group], min(batch_size, len(good)), options)
        for _ in decoder:
            pass
        for (n, _), result in zip(group, decoder.results(), strict=True):
            if result.error and on_error == "raise":
                raise EaglejaxError(f"prompt {n}: {result.error}")
            results[n] = result
    watch(proposer, target, results.values())
    return results[0] if single else [results[n] for n in range(len(items))]


def _requests(
    target: Target,
    items: Sequence[Any],
    *,
    sampling: Any,
    max_new_tokens: Any,
    stop: Any,
    stop_token_ids: Any,
    chat_template_kwargs: Any,
    split_special_tokens: bool,
    predictions: Any,
) -> Iterator[Request | EaglejaxError]:
    """One Request a prompt, or the error that says why it cannot be served."""
    samplings = _per_prompt("sampling", sampling or Sampling(), Sampling, len(items))
    limits = _per_prompt("max_new_tokens", max_new_tokens, int, len(items))
    if not isinstance(stop, str | Sequence):
        raise ConfigError(f"stop is {stop!r}; give a text or a list of texts, empty for none")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if stops and target.tokenizer is None:
        raise ConfigError("stop strings need a tokenizer and this target has none")
    guesses = [predictions] if len(items) == 1 and _is_one_prediction(predictions) else predictions
    guesses = _per_prompt("predictions", guesses, str, len(items))
    given = _per_prompt("chat_template_kwargs", chat_template_kwargs, Mapping, len(items))
    ends = _stop_ids(stop_token_ids, len(items))
    for item, s, limit, guess, more, end in zip(items, samplings, limits, guesses, given, ends, strict=True):
        try:
            ids = encode_prompt(target, item, more, split_special_tokens=split_special_tokens)
            if isinstance(guess, str):
                guess = target.need_tokenizer().encode(guess, special=False)
            request = Request(ids, s, limit, stops, None if guess is None else tuple(guess), end)
            check_request(request, target.context, target.config.vocab_size)
        except RequestError as error:
            yield error
        else:
            yield request


def _stop_ids(value: Any, count: int) -> list[tuple[Any, ...]]:
    """Token ids that end each of ``count`` answers: one list for all, or one each."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"stop_token_ids is {value!r}; give a list of token ids, empty for none")
    if not any(isinstance(v, Sequence) for v in value):
        return [tuple(value)] * count
    if len(value) != count or not all(isinstance(v, Sequence) for v in value):
        raise ConfigError(f"stop_token_ids is {value!r}; give one list of ids, or one list for each prompt")
    return [tuple(v) for v in value]


def _is_one_prediction(predictions: Any) -> bool:
    return isinstance(predictions, Sequence) and bool(predictions) and _is_token(predictions[0])


def stream(
    target: Target,
    prompt: Prompt,
    *,
    proposer: Proposer | Bound | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    split_special_tokens: bool = False,
    prediction: Any = None,
    options: DecodeOptions | None = None,
    **changes: Unpack[DecodeChanges],
) -> Iterator[Piece | Generation]:
    """Decode one prompt: Pieces as their text settles, then the Generation, whose text is the pieces' joined.

    Arguments as in :func:`generate`, and the same errors; four rounds between looks at the host, unless
    ``options`` say otherwise.
    """
    options = dataclasses.replace(options or STREAMING, **changes)
    (request,) = _requests(
        target,
        [prompt],
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        chat_template_kwargs=chat_template_kwargs,
        split_special_tokens=split_special_tokens,
        predictions=None if prediction is None else [prediction],
    )
    if isinstance(request, EaglejaxError):
        raise request
    decoder = decoder_for(target, proposer, [request], 1, options)
    yield from decoder
    (result,) = decoder.results()
    if result.error:
        raise EaglejaxError(result.error)
    watch(proposer, target, [result])
    yield result
