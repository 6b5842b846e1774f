"""The server, as the real ``openai`` client meets it, over the tiny model in a thread."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import uvicorn
from tiny_model import write_model

import eaglejax as ej
from eaglejax.api import encode_prompt
from eaglejax.engine.engine import ENGINE, Engine
from eaglejax.errors import ConfigError
from eaglejax.serve.app import Settings, make_app
from eaglejax.serve.protocol import defaults_of

KEY, NAME, LIMIT = "a secret", "tiny", 24
SAY = [{"role": "user", "content": "Hello there"}]


@dataclasses.dataclass
class Served:
    target: Any
    engine: Engine
    client: openai.OpenAI
    url: str

    def chat(self, **more: Any) -> Any:
        asked = {"model": NAME, "messages": SAY, "max_tokens": LIMIT, "temperature": 0, **more}
        return self.client.chat.completions.create(**asked)

    def post(self, path: str, body: bytes, key: str = KEY) -> tuple[int, Any]:
        request = urllib.request.Request(self.url + path, body, {"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served") / "model"
    write_model(folder)
    said = {"temperature": 0.6, "top_k": 7, "do_sample": True, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(said))
    target = ej.load_target(str(folder), dtype="float32")
    engine = Engine(
        target,
        ej.Prediction(length=4),
        slots=2,
        context=128,
        queue=40,
        top_logprobs=20,
        options=dataclasses.replace(ENGINE, prefill_width=32),
    )
    engine.warm_up()
    app = make_app(engine, Settings(NAME, KEY, body=20_000, timeout=300.0, grace=5.0))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)
    yield Served(target, engine, client, url)
    client.close()
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def offline(served: Served) -> dict[int | None, ej.Generation]:
    """The answer by seed, None for the greedy one, as ``generate`` gives them in one batch."""
    seeds = [None, 5, 6, 7]
    ids = encode_prompt(served.target, SAY, split_special_tokens=True)
    settings = [ej.Sampling() if s is None else ej.Sampling(temperature=0.9, top_k=7, seed=s) for s in seeds]
    results = ej.generate(
        served.target, [list(ids)] * 4, sampling=settings, max_new_tokens=LIMIT, batch_size=4, logprobs=True
    )
    return dict(zip(seeds, results, strict=True))


def test_chat(served: Served, offline: dict[int | None, ej.Generation]) -> None:
    answer = served.chat()
    wanted = offline[None]
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage.completion_tokens == len(wanted.token_ids)
    assert answer.usage.prompt_tokens == wanted.prompt_tokens
    assert answer._request_id
    chunks = list(served.chat(stream=True, stream_options={"include_usage": True}))
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == wanted.text
    assert sum(bool(t) for t in texts) > 2
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == wanted.finish_reason
    assert chunks[-1].usage.completion_tokens == len(wanted.token_ids)
    # What generation_config.json says holds where the client says nothing; temperature is the client's here.
    several = served.chat(temperature=0.9, seed=5, n=2)
    assert [c.message.content for c in several.choices] == [offline[5].text, offline[6].text]
    assert several.usage.prompt_tokens == wanted.prompt_tokens


def test_stop_log_probabilities_and_predictions(
    served: Served, offline: dict[int | None, ej.Generation]
) -> None:
    wanted = offline[None]
    stop = wanted.text[6:8]
    cut = served.chat(stop=[stop]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (wanted.text.partition(stop)[0], "stop")
    told = served.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [t.logprob for t in told] == pytest.approx(wanted.logprobs, abs=1e-4)
    assert [t.token for t in told] == [served.target.tokenizer.decode([i]) for i in wanted.token_ids]
    for place in told:
        assert len(place.top_logprobs) == 3
        # The greedy token is the likeliest.
        assert place.top_logprobs[0].token == place.token
        assert place.top_logprobs[0].logprob == pytest.approx(place.logprob)
    streamed = [
        t
        for c in served.chat(logprobs=True, top_logprobs=3, stream=True)
        if c.choices[0].logprobs
        for t in c.choices[0].logprobs.content
    ]
    assert streamed == told
    guess = {"type": "content", "content": wanted.text}
    usage = served.chat(prediction=guess).usage
    assert usage.completion_tokens_details.accepted_prediction_tokens > 4
    assert usage.completion_tokens_details.rejected_prediction_tokens >= 0
    assert served.chat(prediction=guess).choices[0].message.content == wanted.text


def test_completions(served: Served, offline: dict[int | None, ej.Generation]) -> None:
    ids = list(encode_prompt(served.target, SAY, split_special_tokens=True))
    text = served.target.tokenizer.decode(ids)
    answer = served.client.completions.create(
        model=NAME, prompt=[ids, ids], max_tokens=LIMIT, temperature=0.9, seed=7, logprobs=2, n=1
    )
    assert [c.text for c in answer.choices] == [offline[7].text] * 2
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(offline[7].logprobs, abs=1e-4)
    assert answer.usage.prompt_tokens == 2 * len(ids)
    pieces = served.client.completions.create(
        model=NAME, prompt=text, max_tokens=LIMIT, temperature=0, stream=True
    )
    assert "".join(p.choices[0].text for p in pieces) == offline[None].text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages must be a list"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type text"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "role"),
    ({"temprature": 1}, "unrecognized request argument: 'temprature'"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"temperature": -1}, "temperature=-1"),
    ({"max_tokens": 0}, "max_tokens must be"),
    ({"n": 99}, "n must be a whole number from 1 to 16"),
    ({"stop": [1]}, "stop is a text"),
    ({"stop": ""}, "stop string is empty"),
    ({"seed": -1}, "seed=-1"),
    ({"top_logprobs": 2}, "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
    ({"logit_bias": {"x": 1}}, "maps token ids"),
    ({"logit_bias": {"999999": 1}}, "vocabulary ends"),
    ({"prediction": {"type": "content"}}, "prediction must be"),
    ({"stream_options": {"include_usage": True}}, "for streams alone"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools are not supported"),
    ({"messages": [{"role": "user", "content": "x" * 500}]}, "the context 128"),
]


def test_what_cannot_be_served_is_refused_in_the_apis_form(served: Served) -> None:
    for change, message in BAD:
        body = {"model": NAME, "messages": SAY, **change}
        status, said = served.post("/v1/chat/completions", json.dumps(body).encode())
        assert status == 400, (change, said)
        assert message in said["error"]["message"]
        assert set(said["error"]) == {"message", "type", "param", "code"}
    with pytest.raises(openai.BadRequestError) as caught:
        served.chat(messages=[{"role": "user", "content": "x" * 500}])
    assert caught.value.code == "context_length_exceeded"
    for body in (b"", b"{", b"[]", b"\xff", b"[" * 5000, b'{"messages": 1e999}'):
        status, said = served.post("/v1/chat/completions", body)
        assert status == 400, body
        assert "Traceback" not in json.dumps(said)
    assert served.post("/v1/chat/completions", b" " * 30_000)[0] == 413
    assert served.post("/v1/nothing", b"{}")[0] == 404
    assert served.post("/v1/chat/completions", b"{}", key="another")[0] == 401
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError):
        served.chat(model="other")
    assert [m.id for m in served.client.models.list()] == [NAME]


def metrics(served: Served) -> dict[str, float]:
    with urllib.request.urlopen(served.url + "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_many_clients_some_of_whom_vanish(served: Served, offline: dict[int | None, ej.Generation]) -> None:
    before = metrics(served)
    with urllib.request.urlopen(served.url + "/health") as reply:
        assert reply.status == 200

    def ask(which: int) -> None:
        seed = [None, 5, 6, 7][which % 4]
        more: dict[str, Any] = {} if seed is None else {"temperature": 0.9, "seed": seed}
        if which % 6 == 5:
            # One who hangs up in the middle of a long answer.
            stream = served.chat(stream=True, max_tokens=100, **more)
            next(iter(stream))
            stream.close()
        elif which % 3 == 1:
            chunks = list(served.chat(stream=True, **more))
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == offline[seed].text
        else:
            assert served.chat(**more).choices[0].message.content == offline[seed].text

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(24)))
    end = time.monotonic() + 60
    while not served.engine.idle and time.monotonic() < end:
        time.sleep(0.02)
    after = metrics(served)
    label = f'{{model_name="{NAME}"}}'
    assert after[f"vllm:num_requests_running{label}"] == after[f"vllm:num_requests_waiting{label}"] == 0
    ended = [sum(v for k, v in m.items() if "request_success" in k) for m in (before, after)]
    assert ended[1] - ended[0] == 24
    assert after[f"vllm:generation_tokens_total{label}"] > before[f"vllm:generation_tokens_total{label}"]
    drafts, accepted = (
        after[f"vllm:spec_decode_num_{name}_total{label}"] for name in ("draft_tokens", "accepted_tokens")
    )
    assert 0 < accepted < drafts
    at = [v for k, v in after.items() if "accepted_tokens_per_pos" in k]
    assert sum(at) == accepted


def test_the_models_own_defaults(served: Served) -> None:
    assert defaults_of(served.target) == {"temperature": 0.6, "top_k": 7}
    file = served.target.source.path / "generation_config.json"
    whole = file.read_text()
    try:
        file.write_text('{"do_sample": false, "temperature": 0.6}')
        assert defaults_of(served.target) == {"temperature": 0.0}
        file.write_text('{"top_p": 7}')
        with pytest.raises(ConfigError, match="top_p=7"):
            defaults_of(served.target)
        file.write_text("{")
        with pytest.raises(ConfigError, match=r"generation_config.json is no JSON"):
            defaults_of(served.target)
    finally:
        file.write_text(whole)


def test_the_command_refuses_what_is_open_to_others(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLEJAX_API_KEY", raising=False)
    status, _, said = run("serve", "--target", "demo", "--host", "0.0.0.0")
    assert status == 2
    assert "EAGLEJAX_API_KEY" in said
    status, _, said = run("serve", "--target", "demo", "--port", "99999")
    assert status == 2
    assert "--port is 99999" in said
