"""The HTTP side of a server: routes, limits, streams, errors of the API's form, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from eaglejax import json_text
from eaglejax.engine.engine import BusyError, Engine
from eaglejax.errors import EaglejaxError
from eaglejax.serve.driver import Driver, StoppedError, Ticket
from eaglejax.serve.protocol import ApiError, Asked, defaults_of, logprobs, read, usage
from eaglejax.speculate.books import Generation

log = logging.getLogger("eaglejax.serve")


@dataclasses.dataclass(frozen=True)
class Settings:
    """``name``: of the model, as clients say it; ``key``: what they must show, None for nothing; ``timeout``:
    seconds after which a request ends; ``body``: most bytes of one; ``body_seconds``: in which it must have
    come; ``grace``: seconds that a shutdown leaves to what is under way."""

    name: str
    key: str | None = None
    timeout: float = 600.0
    body: int = 4 << 20
    body_seconds: float = 30.0
    grace: float = 30.0


def make_app(engine: Engine, settings: Settings) -> FastAPI:
    """The application; the engine's thread lives as long as it does. Raises ConfigError for a damaged
    generation_config.json."""
    driver, defaults = Driver(engine), defaults_of(engine.target)

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        driver.start()
        yield
        left = await asyncio.to_thread(driver.stop, settings.grace)
        if left:
            log.warning("%d requests were cut short by the shutdown", left)

    app = FastAPI(title="eaglejax", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Any]) -> Response:
        number = uuid.uuid4().hex
        begin = time.monotonic()
        if request.url.path.startswith("/v1/") and not _known(request, settings.key):
            response: Response = _refused(
                ApiError(
                    "the API key is missing or wrong",
                    401,
                    kind="authentication_error",
                    code="invalid_api_key",
                )
            )
        else:
            response = await call_next(request)
        response.headers["x-request-id"] = number
        took = time.monotonic() - begin
        log.info("%s %s %d %.3f s %s", request.method, request.url.path, response.status_code, took, number)
        return response

    @app.exception_handler(HTTPException)
    async def not_here(_: Request, error: HTTPException) -> Response:
        return _refused(ApiError(str(error.detail), error.status_code))

    @app.exception_handler(EaglejaxError)
    async def refused(_: Request, error: EaglejaxError) -> Response:
        if isinstance(error, BusyError):
            error = ApiError(str(error), 429, kind="rate_limit_error", code="queue_full")
        elif isinstance(error, StoppedError):
            error = ApiError(str(error), 503, kind="server_error")
        return _refused(error if isinstance(error, ApiError) else ApiError(str(error)))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        log.error("a request failed: %s", type(error).__name__, exc_info=error)
        return _refused(ApiError("the server failed; its log says why", 500, kind="server_error"))

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(metrics_text(engine, settings.name), media_type="text/plain; version=0.0.4")

    model = {"id": settings.name, "object": "model", "created": int(time.time()), "owned_by": "eaglejax"}
    model["max_model_len"] = engine.context

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        _check_model(name, settings.name)
        return JSONResponse(model)

    async def answer(request: Request, *, chat: bool) -> Response:
        body = await _body(request, settings)
        if isinstance(body, dict):
            _check_model(body.get("model", settings.name), settings.name)
        asked = await asyncio.to_thread(read, body, engine.target, engine.context, defaults, chat=chat)
        ticket = await driver.submit(
            asked.requests,
            priority=asked.priority,
            deadline=settings.timeout,
            logprobs=asked.top is not None,
            top_logprobs=asked.top or 0,
        )
        reply = _Reply(engine, driver, ticket, asked, settings.name)
        if asked.stream:
            return StreamingResponse(reply.stream(), media_type="text/event-stream")
        return await reply.whole(request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, chat=False)

    return app


class _Reply:
    """The answer to one body."""

    def __init__(self, engine: Engine, driver: Driver, ticket: Ticket, asked: Asked, name: str) -> None:
        self._engine, self._driver, self._ticket, self._asked = engine, driver, ticket, asked
        self._place = {number: index for index, number in enumerate(ticket.ids)}
        self._results: dict[int, Generation] = {}
        self._object = "chat.completion" if asked.chat else "text_completion"
        prefix = "chatcmpl" if asked.chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    async def whole(self, request: Request) -> Response:
        """One object; a client that goes takes its rows along."""
        try:
            while len(self._results) < len(self._place):
                try:
                    event = await asyncio.wait_for(self._ticket.events.get(), 0.25)
                except TimeoutError:
                    if await request.is_disconnected():
                        return Response(status_code=499)
                    continue
                if event.result is not None:
                    self._results[self._place[event.id]] = event.result
        finally:
            self._driver.cancel(self._ticket)
        results = self._in_order()
        for result in results:
            if (error := _error_of(result)) is not None:
                return _refused(error)
        choices = []
        for index, result in enumerate(results):
            text: dict[str, Any] = {"text": result.text}
            if self._asked.chat:
                text = {"message": {"role": "assistant", "content": result.text, "refusal": None}}
            told = self._told(result, 0)
            reason = result.finish_reason
            choices.append({"index": index, **text, "logprobs": told, "finish_reason": reason})
        body = {
            **self._head,
            "object": self._object,
            "choices": choices,
            "usage": usage(results, self._asked),
        }
        return JSONResponse(body)

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events; when the client goes, the generator is closed and its rows with it."""
        sent = dict.fromkeys(self._place.values(), 0)
        try:
            if self._asked.chat:
                for index in self._place.values():
                    yield self._chunk(index, {"role": "assistant", "content": ""}, None, None)
            while len(self._results) < len(self._place):
                event = await self._ticket.events.get()
                index, result = self._place[event.id], event.result
                if result is not None:
                    self._results[index] = result
                    if (error := _error_of(result)) is not None:
                        yield _line(error.body)
                        return
                if event.text:
                    text = {"content": event.text} if self._asked.chat else event.text
                    yield self._chunk(index, text, None, None)
                if result is not None:
                    # Only now it is certain which tokens a stop string leaves.
                    told = self._told(result, sent[index])
                    if told is not None:
                        yield self._chunk(index, {} if self._asked.chat else "", told, None)
                    yield self._chunk(index, {} if self._asked.chat else "", None, result.finish_reason)
            if self._asked.usage:
                body = {**self._head, "object": self._kind, "choices": []}
                yield _line({**body, "usage": usage(self._in_order(), self._asked)})
            yield b"data: [DONE]\n\n"
        finally:
            self._driver.cancel(self._ticket)

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._asked.chat else self._object

    def _chunk(self, index: int, text: Any, told: Any, reason: str | None) -> bytes:
        part = {"delta": text} if self._asked.chat else {"text": text}
        choice = {"index": index, **part, "logprobs": told, "finish_reason": reason}
        body = {**self._head, "object": self._kind, "choices": [choice]}
        return _line({**body, "usage": None} if self._asked.usage else body)

    def _told(self, result: Generation, begin: int) -> dict[str, Any] | None:
        if self._asked.top is None:
            return None
        return logprobs(self._engine.target, result, begin, chat=self._asked.chat)

    def _in_order(self) -> list[Generation]:
        return [self._results[index] for index in sorted(self._results)]


def _line(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


def _error_of(result: Generation) -> ApiError | None:
    """What a client is told of a row that did not come to its end."""
    if result.finish_reason == "cancelled":
        return ApiError("the server was shut down", 503, kind="server_error")
    if result.error is None:
        return None
    if "deadline passed" in result.error:
        return ApiError(result.error, 504, kind="server_error", code="timeout")
    return ApiError(result.error, 500, kind="server_error")


def _refused(error: ApiError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 429:
        headers["Retry-After"] = "1"
    return JSONResponse(error.body, status_code=error.status, headers=headers)


def _known(request: Request, key: str | None) -> bool:
    """Whether the client shows the key; how long that takes says nothing of it."""
    if key is None:
        return True
    given = request.headers.get("authorization", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {key}".encode())


def _check_model(asked: Any, name: str) -> None:
    if asked != name:
        raise ApiError(
            f"the model {asked!r:.200} is not served here; it is {name!r}",
            404,
            param="model",
            code="model_not_found",
        )


async def _body(request: Request, settings: Settings) -> Any:
    """The JSON of a request, within bounds. Raises ApiError."""
    parts, size = [], 0

    async def take() -> None:
        nonlocal size
        async for part in request.stream():
            size += len(part)
            if size > settings.body:
                raise ApiError(f"the body is longer than {settings.body} bytes", 413, code="body_too_large")
            parts.append(part)

    try:
        await asyncio.wait_for(take(), settings.body_seconds)
        return json_text.parse(b"".join(parts))
    except TimeoutError:
        raise ApiError(f"the body did not come within {settings.body_seconds:g} s", 408) from None
    except json_text.JsonError as error:
        raise ApiError(f"the body is {error}") from None


def metrics_text(engine: Engine, name: str) -> str:
    """Prometheus text, by the names that vLLM's counters have."""
    totals, label = engine.totals, json.dumps(name, ensure_ascii=False)
    rows: list[tuple[str, str, str, list[tuple[str, float]]]] = [
        ("num_requests_running", "gauge", "Requests that are decoded.", [("", engine.running)]),
        ("num_requests_waiting", "gauge", "Requests that wait for a slot.", [("", engine.waiting)]),
        ("num_preemptions_total", "counter", "Slots taken from requests.", [("", totals.preemptions)]),
        ("prompt_tokens_total", "counter", "Prompt tokens of ended requests.", [("", totals.prompt_tokens)]),
        (
            "generation_tokens_total",
            "counter",
            "Tokens of ended requests.",
            [("", totals.generated_tokens)],
        ),
        (
            "request_success_total",
            "counter",
            "Ended requests by reason.",
            [(f',finished_reason="{why}"', count) for why, count in sorted(totals.reasons.items())],
        ),
        ("spec_decode_num_drafts_total", "counter", "Rounds that drafted.", [("", totals.drafts)]),
        ("spec_decode_num_draft_tokens_total", "counter", "Drafts.", [("", totals.draft_tokens)]),
        (
            "spec_decode_num_accepted_tokens_total",
            "counter",
            "Drafts that became text.",
            [("", totals.accepted_tokens)],
        ),
        (
            "spec_decode_num_accepted_tokens_per_pos_total",
            "counter",
            "Rounds that accepted a draft at each position.",
            [(f',position="{i}"', count) for i, count in enumerate(list(totals.accepted_at))],
        ),
    ]
    lines = []
    for key, kind, about, values in rows:
        lines += [f"# HELP vllm:{key} {about}", f"# TYPE vllm:{key} {kind}"]
        lines += [f"vllm:{key}{{model_name={label}{more}}} {value}" for more, value in values]
    return "\n".join(lines) + "\n"
