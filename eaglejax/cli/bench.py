"""``eaglejax bench``: speed and acceptance of methods, beside the fastest plain decoding of the session."""

from __future__ import annotations

import dataclasses
from typing import Literal

from eaglejax.cli import methods, show
from eaglejax.config import (
    AuxConvention,
    SpeculativeConfig,
    parse_speculative_config,
    parse_template_kwargs,
    read_prompts,
)
from eaglejax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Bench:
    """Decode every prompt greedily with each method, one at a time, and compare."""

    target: str
    """The model: `demo`, a folder, a .gguf file or a Hub id."""
    prompts: str
    """A JSON Lines file, see `eaglejax generate`."""
    methods: str | None = None
    """Methods with commas between them; plain decoding (ar) is always among them. Default: ngram, or what the
    draft is (eagle, dflash, mtp or draft_model)."""
    draft: str | None = None
    """The draft of methods that have one: a folder, a Hub id or `demo`."""
    speculative_config: str | None = None
    """Settings of the method that it names, as for `eaglejax generate`."""
    speculation: Literal["adaptive", "fixed"] | None = None
    """How many drafts a round are judged, as for `eaglejax generate`."""
    aux_convention: AuxConvention | None = None
    """What layer ids in an EAGLE-3 draft's config count: hidden-state boundaries, or blocks (their output is
    meant). Default: told from the file."""
    prediction_field: str | None = None
    """The field of the prompt file that holds what the answer will mostly repeat."""
    max_new_tokens: int = 256
    """Most tokens of an answer."""
    limit: int | None = None
    """Read this many prompts at most."""
    chat: bool = False
    """Wrap plain prompts in the model's chat template; messages and turns always are."""
    chat_template_kwargs: str | None = None
    """What the chat template reads beside the messages, as for `eaglejax generate`."""
    quant: str | None = None
    """Hold the target's weights in 8 or 4 bits, as for `eaglejax generate`; float32 is not measured then."""
    context: int | None = None
    """Longest sequence, prompt and answer together. Default: what the model was made for."""
    eos: tuple[str, ...] = ()
    """Further tokens, texts or ids, that end every text, for models whose files name none."""
    dtype: str | None = None
    """Measure in this dtype alone. Default: bfloat16, and on a CPU plain decoding in float32 too."""
    kv_cache_dtype: str | None = None
    """Keys and values of the target, as for `eaglejax generate`, in plain decoding and with drafts."""
    draft_kv_cache_dtype: str | None = None
    """Keys and values of the draft, as for `eaglejax generate`."""
    profile: bool = False
    """Measure too where a round's time goes (draft, verification, host), on the first prompt."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def run(self) -> int:
        """The command. Exit status 1 when a prompt failed or a text is not plain decoding's."""
        configs = self._configs()
        own = {n: methods.decoding(c, speculation=self.speculation) for n, c in configs.items()}
        methods.check_count("--max-new-tokens", self.max_new_tokens)
        variables = parse_template_kwargs(self.chat_template_kwargs)
        rows = read_prompts(self.prompts, prediction_field=self.prediction_field, limit=self.limit)
        target = methods.load_target(
            self.target,
            dtype=self.dtype,
            context=self.context,
            quant=self.quant,
            eos=self.eos,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        methods.say_memory(target)
        from eaglejax.cli import session as sessions

        proposers = {name: methods.proposer_from(target, config) for name, config in configs.items()}
        # A model with quantised weights is another one than its float32 form.
        wide = self.dtype is None and self.quant is None
        reference = sessions.float32_beside(target) if wide else None
        dtype = target.dtype.name
        session = sessions.Session(
            self.max_new_tokens,
            chat=self.chat,
            variables=variables,
            decoding=methods.given(speculation=self.speculation),
            own=own,
        )
        session.run(target, proposers, rows, reference)
        if self.profile:
            session.profile(target, proposers)
        if wide and reference is None and sessions.plain_in_float32_too():
            del proposers
            target = sessions.reload_in_float32(target)
            session.run_plain(sessions.FLOAT32_AR, target)
        report = {**session.report(), "machine": sessions.machine_report(dtype)}
        if self.json:
            show.print_json(report)
        else:
            console = show.stderr()
            title = f"{self.target}, {session.best_ar} is the fastest AR"
            console.print(show.stats_table(title, report["methods"].items()))
            show.print_widths(report["methods"].items())
            show.print_vllm(report["methods"].items())
            if self.profile:
                console.print(show.profile_table("where a round's time goes", report["methods"].items()))
        for error in report["errors"]:
            show.print_error(f"prompt {error['id']}: {error['error']}")
        return 0 if session.sound else 1

    def _configs(self) -> dict[str, SpeculativeConfig]:
        given = None if self.speculative_config is None else parse_speculative_config(self.speculative_config)
        if given is not None and given.model not in (None, self.draft):
            raise ConfigError(f"--speculative-config names the draft {given.model!r}; use --draft for it")
        if given is not None:
            given = dataclasses.replace(given, method=methods.method_name(given.method))
        if self.methods is not None:
            names = [methods.method_name(name.strip()) for name in self.methods.split(",")]
        else:
            names = [given.method if given else methods.method_for(self.draft) if self.draft else "ngram"]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ConfigError(f"--methods names {min(repeated)!r} twice")
        chosen = {name: methods.method_named(name) for name in dict.fromkeys(["ar", *names])}
        if self.draft is not None and not any(m.takes_draft for m in chosen.values()):
            raise ConfigError(
                f"none of the methods {', '.join(names)} uses a draft, but --draft is {self.draft!r}"
            )
        predicts = any(m.reads_prediction for m in chosen.values())
        if predicts != (self.prediction_field is not None):
            raise ConfigError(
                "method 'prediction' and --prediction-field go together: the field holds what it drafts from"
            )
        if given is not None and given.method not in chosen:
            raise ConfigError(
                f"--speculative-config sets up {given.method!r}, which is not among {', '.join(names)}"
            )
        configs = {}
        needed = any(m.needs_draft for m in chosen.values())
        for name, method in chosen.items():
            config = given if given is not None and given.method == name else SpeculativeConfig(name)
            # A method whose draft may be among the target's files takes the named one where nobody needs it.
            if method.needs_draft or (method.takes_draft and not needed):
                config = dataclasses.replace(config, model=self.draft)
            if self.aux_convention is not None and "aux_convention" in method.settings:
                config = dataclasses.replace(config, aux_convention=self.aux_convention)
            if self.draft_kv_cache_dtype is not None and method.takes_draft:
                config = dataclasses.replace(config, kv_cache_dtype=self.draft_kv_cache_dtype)
            configs[name] = config
        if self.aux_convention is not None and not any(c.aux_convention for c in configs.values()):
            raise ConfigError(f"none of the methods {', '.join(names)} reads layers by an aux convention")
        if self.draft_kv_cache_dtype is not None and not any(c.kv_cache_dtype for c in configs.values()):
            raise ConfigError(f"none of the methods {', '.join(names)} has a draft with a cache")
        for config in configs.values():
            methods.check_config(config)
        return configs
