"""What clients send and are sent: the bodies of OpenAI's API, read strictly, and its answers.

A key that is not known is refused, so that a slip of the pen does not change an answer unseen.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from eaglejax.api import encode_prompt
from eaglejax.drafts.base import Request
from eaglejax.errors import ConfigError, EaglejaxError, RequestError
from eaglejax.models.target import Target
from eaglejax.sampling_settings import Sampling
from eaglejax.speculate.books import Generation

MOST_CHOICES, MOST_STOPS, MOST_TOP = 16, 16, 20
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
SHARED = {
    *SAMPLING,
    "model",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "max_tokens",
    "n",
    "stream",
    "stream_options",
    "logprobs",
    "priority",
    "user",
}
CHAT = {
    *SHARED,
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "prediction",
    "response_format",
    "chat_template_kwargs",
    "tools",
    "tool_choice",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
}
TEXT = {*SHARED, "prompt", "echo", "suffix", "best_of", "prediction"}


class ApiError(RequestError):
    """A refusal, with HTTP ``status`` and what the body of an error has: ``kind``, ``param``, ``code``."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code

    @property
    def body(self) -> dict[str, Any]:
        """Of the API's form."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A body, understood. ``requests``: the ``choices`` of each prompt in turn; ``top``: None where no
    log-probabilities are asked for."""

    requests: tuple[Request, ...]
    choices: int
    chat: bool
    stream: bool
    usage: bool
    top: int | None
    priority: int


def defaults_of(target: Target) -> dict[str, Any]:
    """Sampling where a client says nothing: what ``generation_config.json`` beside the target says, else
    temperature 1. Raises ConfigError for values that cannot be."""
    found: dict[str, Any] = {"temperature": 1.0}
    folder = target.source.path if target.source is not None else None
    file = None if folder is None else folder / "generation_config.json"
    if file is None or not file.is_file():
        return found
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from None
    if not isinstance(said, dict):
        raise ConfigError(f"{file} must hold an object")
    found |= {name: said[name] for name in SAMPLING if said.get(name) is not None}
    if said.get("do_sample") is False:
        found["temperature"] = 0.0
    Sampling(**found)
    return found


def read(body: Any, target: Target, context: int, defaults: Mapping[str, Any], *, chat: bool) -> Asked:
    """``body`` of /v1/chat/completions (``chat``) or /v1/completions. Raises ApiError."""
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    unknown = sorted(set(body) - (CHAT if chat else TEXT))
    if unknown:
        raise ApiError(f"unrecognized request argument: {unknown[0]!r:.100}", param=str(unknown[0])[:100])
    body = {name: value for name, value in body.items() if value is not None}
    if body.get("tools") or body.get("tool_choice", "none") not in ("none", "auto"):
        raise ApiError("tools are not supported by this server", param="tools")
    if body.get("response_format", {"type": "text"}) != {"type": "text"}:
        raise ApiError("response_format can be text alone", param="response_format")
    for name in ("echo", "suffix"):
        if body.get(name):
            raise ApiError(f"{name} is not supported", param=name)
    n = _whole(body, "n", 1, 1, MOST_CHOICES)
    if body.get("best_of", n) != n:
        raise ApiError("best_of is not supported", param="best_of")
    try:
        settings = {**defaults, **{name: body[name] for name in SAMPLING if name in body}}
        sampling = Sampling(**settings, logit_bias=_bias(body), seed=body.get("seed"))
        prompts = [_conversation(body, target)] if chat else _prompts(body, target)
    except EaglejaxError as error:
        raise error if isinstance(error, ApiError) else ApiError(str(error)) from None
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    requests = []
    for ids in prompts:
        room = context - len(ids)
        if room < 1:
            raise ApiError(
                f"the prompt has {len(ids)} tokens and the context {context}; shorten it",
                param="messages" if chat else "prompt",
                code="context_length_exceeded",
            )
        most = _whole(body, limit, room if chat else 16, 0 if not chat else 1, 2**31)
        one = Request(ids, sampling, most, _stops(body, target), _prediction(body, target), _stop_ids(body))
        for choice in range(n):
            how = sampling
            if sampling.seed is not None:
                how = dataclasses.replace(sampling, seed=(sampling.seed + choice) % 2**64)
            requests.append(dataclasses.replace(one, sampling=how))
    stream = _flag(body, "stream")
    options = body.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise ApiError("stream_options is an object with include_usage", param="stream_options")
    if options and not stream:
        raise ApiError("stream_options is for streams alone", param="stream_options")
    if chat:
        top = _whole(body, "top_logprobs", 0, 0, MOST_TOP) if _flag(body, "logprobs") else None
        if top is None and body.get("top_logprobs"):
            raise ApiError("top_logprobs needs logprobs", param="top_logprobs")
    else:
        top = _whole(body, "logprobs", 0, 0, MOST_TOP) if "logprobs" in body else None
    priority = _whole(body, "priority", 0, -1000, 1000)
    return Asked(tuple(requests), n, chat, stream, _flag(options, "include_usage"), top, priority)


def _whole(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ApiError(f"{name} must be a whole number from {least} to {most}", param=name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name) or False
    if not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false", param=name)
    return value


def _bias(body: Mapping[str, Any]) -> dict[int, float] | None:
    given = body.get("logit_bias")
    if given is None:
        return None
    try:
        bias = {int(token): float(value) for token, value in given.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise ApiError("logit_bias maps token ids to numbers", param="logit_bias") from None
    # The API's ends of the scale ban a token and force it.
    return {token: float("-inf") if value <= -100 else value for token, value in bias.items()}


def _stops(body: Mapping[str, Any], target: Target) -> tuple[str, ...]:
    given = body.get("stop", ())
    stops = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given
    if not isinstance(stops, tuple) or len(stops) > MOST_STOPS or not all(isinstance(s, str) for s in stops):
        raise ApiError(f"stop is a text or a list of up to {MOST_STOPS} texts", param="stop")
    if stops:
        target.need_tokenizer()
    return stops


def _stop_ids(body: Mapping[str, Any]) -> tuple[int, ...]:
    given = body.get("stop_token_ids", [])
    if not isinstance(given, list) or len(given) > MOST_STOPS:
        raise ApiError(f"stop_token_ids is a list of up to {MOST_STOPS} ids", param="stop_token_ids")
    return tuple(given)


def _text(content: Any, param: str) -> str:
    """A text, or its parts joined."""
    if isinstance(content, list) and all(
        isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content
    ):
        return "".join(p["text"] for p in content)
    if not isinstance(content, str):
        raise ApiError(f"{param} must be a text or a list of parts of type text", param=param)
    return content


def _prediction(body: Mapping[str, Any], target: Target) -> tuple[int, ...] | None:
    given = body.get("prediction")
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "content" or set(given) != {"type", "content"}:
        raise ApiError('prediction must be {"type": "content", "content": TEXT}', param="prediction")
    text = _text(given["content"], "prediction")
    return tuple(target.need_tokenizer().encode(text, special=False))


def _conversation(body: Mapping[str, Any], target: Target) -> tuple[int, ...]:
    messages, variables = body.get("messages"), body.get("chat_template_kwargs", {})
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ApiError("messages must be a list of one message or more", param="messages")
    if not isinstance(variables, dict):
        raise ApiError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    plain = []
    for message in messages:
        content = message.get("content")
        plain.append({**message, "content": "" if content is None else _text(content, "messages")})
    return encode_prompt(target, plain, variables, split_special_tokens=True)


def _prompts(body: Mapping[str, Any], target: Target) -> list[tuple[int, ...]]:
    given = body.get("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_CHOICES:
        raise ApiError(f"prompt is a text, token ids, or up to {MOST_CHOICES} of such", param="prompt")
    if not all(isinstance(p, str | list) for p in given):
        raise ApiError("prompt is a text, token ids, or a list of such", param="prompt")
    prompts = [encode_prompt(target, p) for p in given]
    bad = next((t for ids in prompts for t in ids if not 0 <= t < target.config.vocab_size), None)
    if bad is not None:
        raise ApiError(f"prompt holds {bad}, which is no token id", param="prompt")
    return prompts


def usage(results: Sequence[Generation], asked: Asked) -> dict[str, Any]:
    """Tokens of an answer; with a prediction, how many drafts were accepted and how many were not."""
    prompt = sum(r.prompt_tokens for r in results[:: asked.choices])
    answer = sum(len(r.token_ids) for r in results)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
    }
    if any(r.prediction is not None for r in asked.requests):
        accepted = sum(r.stats.num_accepted_tokens for r in results)
        drafted = sum(r.stats.num_draft_tokens for r in results)
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return found


def logprobs(target: Target, result: Generation, begin: int, *, chat: bool) -> dict[str, Any]:
    """Log-probabilities of the tokens from ``begin`` on, in the form of either kind of answer."""
    tokenizer = target.need_tokenizer()
    values = (result.logprobs or [])[begin:]
    ids = result.token_ids[begin : begin + len(values)]
    best = (result.top_logprobs or [[]] * (begin + len(values)))[begin:]

    def entry(token: int, value: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    if chat:
        content = [
            {**entry(t, v), "top_logprobs": [entry(*pair) for pair in b]}
            for t, v, b in zip(ids, values, best, strict=True)
        ]
        return {"content": content, "refusal": None}
    ends = [len(tokenizer.decode(result.token_ids[: begin + i])) for i in range(len(ids))]
    return {
        "tokens": [tokenizer.decode([t]) for t in ids],
        "token_logprobs": values,
        "top_logprobs": [{tokenizer.decode([t]): v for t, v in b} for b in best],
        "text_offset": ends,
    }
