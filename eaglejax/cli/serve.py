"""``eaglejax serve``: a server that speaks OpenAI's API."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import os

from eaglejax.cli import methods, show
from eaglejax.errors import ConfigError

KEY = "EAGLEJAX_API_KEY"


@dataclasses.dataclass(frozen=True)
class Serve:
    """Serve a target model over HTTP, drafting as asked; see docs/serving.md."""

    target: str
    """The model: `demo`, a folder, a .gguf file or a Hub id."""
    draft: str | None = None
    """The draft: an EAGLE, DFlash or MTP checkpoint or a smaller model; a folder, a Hub id or `demo`."""
    method: str | None = None
    """How to draft, as for `generate`."""
    speculative_config: str | None = None
    """A JSON object such as {"method": "ngram", "num_speculative_tokens": 4}."""
    host: str = "127.0.0.1"
    """Where to listen; any other than this machine's own needs an API key."""
    port: int = 8000
    """On which port."""
    name: str | None = None
    """What clients call the model. Default: the target, as it is given."""
    slots: int = 8
    """Requests decoded together."""
    queue: int = 64
    """Requests that may wait besides; more are refused with status 429."""
    context: int = 4096
    """Longest prompt and answer together; every slot has room for so many tokens. At most the model's."""
    timeout: float = 600.0
    """Seconds after which a request ends."""
    grace: float = 30.0
    """Seconds that a shutdown leaves to requests that are under way."""
    dtype: str | None = None
    """bfloat16, float32 or float16, of weights and activations. Default: bfloat16."""
    quant: str | None = None
    """Hold the target's weights in 8 or 4 bits, as for `generate`."""
    kv_cache_dtype: str | None = None
    """Keys and values of the target, as for `generate`."""

    def run(self) -> int:
        """The command: until it is interrupted."""
        try:
            import uvicorn

            from eaglejax.serve.app import Settings, make_app
        except ImportError:
            raise ConfigError("serving needs FastAPI and uvicorn: pip install 'eaglejax[serve]'") from None
        from eaglejax.engine.engine import Engine

        key = os.environ.get(KEY) or None
        if key is None and not _own(self.host):
            raise ConfigError(
                f"--host {self.host} is open to others: set {KEY}, which clients must show then"
            )
        if not 0 < self.port < 65536:
            raise ConfigError(f"--port is {self.port}; it must lie between 1 and 65535")
        for option, value in (("--timeout", self.timeout), ("--grace", self.grace)):
            if not 0 < value < 1e9:
                raise ConfigError(f"{option} is {value}; it must be a positive number of seconds")
        config = methods.speculation(self.speculative_config, method=self.method, draft=self.draft)
        methods.check_plain_decoding(config, "serve")
        target = methods.load_target(
            self.target, dtype=self.dtype, quant=self.quant, kv_cache_dtype=self.kv_cache_dtype
        )
        target.need_tokenizer()
        engine = Engine(
            target,
            methods.proposer_from(target, config),
            slots=self.slots,
            queue=self.queue,
            context=min(self.context, target.context),
            top_logprobs=20,
        )
        with show.status("compiling"):
            engine.warm_up()
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        settings = Settings(self.name or self.target, key, timeout=self.timeout, grace=self.grace)
        show.print_note(f"serving {settings.name} on http://{self.host}:{self.port}/v1")
        uvicorn.run(
            make_app(engine, settings),
            host=self.host,
            port=self.port,
            log_level="warning",
            access_log=False,
            limit_concurrency=self.slots + self.queue + 64,
            timeout_graceful_shutdown=int(self.grace) + 1,
            h11_max_incomplete_event_size=1 << 16,
        )
        return 0


def _own(host: str) -> bool:
    """Whether ``host`` names this machine to itself alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
