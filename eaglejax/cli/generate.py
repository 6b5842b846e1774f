"""``eaglejax generate``: answers to prompts."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import eaglejax as ej
from eaglejax.cli import methods, show
from eaglejax.cli.answers import answer_json, answer_rows, bad_row_json, in_groups
from eaglejax.config import (
    AuxConvention,
    BadRow,
    PromptRow,
    SpeculativeConfig,
    parse_logit_bias,
    parse_template_kwargs,
    read_prompts,
)
from eaglejax.errors import ConfigError
from eaglejax.sampling_settings import Sampling


@dataclasses.dataclass(frozen=True)
class Generate:
    """Answer prompts with a target model, drafting as asked; the text is the target's whatever the draft."""

    target: str
    """The model: `demo`, a folder, a .gguf file or a Hub id."""
    draft: str | None = None
    """The draft: a checkpoint of any kind that runs here or a smaller model; a folder, a Hub id or `demo`."""
    method: str | None = None
    """ar, ngram, suffix, prediction, cascade, or what a draft is: eagle, eagle1, eagle2, eagle3, dflash,
    medusa, draft_model, mtp, ... Default: by what the draft is, and ar without one."""
    prompt: str | None = None
    """One prompt."""
    prompts: str | None = None
    """A JSON Lines file with one object a line: {"prompt"}, {"messages"} or {"turns"}, perhaps {"id"}; - is
    the standard input."""
    chat: bool = False
    """Wrap plain prompts in the model's chat template; messages and turns always are."""
    system: str | None = None
    """A system message for conversations that begin with none."""
    chat_template_kwargs: str | None = None
    """What the chat template reads beside the messages, a JSON object such as {"enable_thinking": false}; a
    row's own "chat_template_kwargs" go before."""
    split_special_tokens: bool = False
    """Take control tokens that prompts and messages spell, such as <|im_end|>, for text."""
    prediction_field: str | None = None
    """The field of the prompt file that holds what the answer will mostly repeat."""
    max_new_tokens: int = 256
    """Most tokens of an answer."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this probability; 1 keeps all."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this share of the likeliest one's; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divide (if negative, multiply) the logits of tokens in prompt or text; 0.001 to 1000."""
    presence_penalty: float = 0.0
    """Take this off the logits of tokens that the text holds; -1000 to 1000."""
    frequency_penalty: float = 0.0
    """Take this off the logits of tokens for each time that the text holds them; -1000 to 1000."""
    logit_bias: str | None = None
    """What is added to logits, a JSON object from ids to numbers ("-inf" bans): {"13": -2.5}."""
    stop: tuple[str, ...] = ()
    """Texts before which an answer ends; control tokens may be spelled in them."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer, beside those of a row's own "stop_token_ids"."""
    eos: tuple[str, ...] = ()
    """Further tokens, texts or ids, that end every text, for models whose files name none."""
    logprobs: bool = False
    """With --json: the log-probability of every token under the model, before any sampling transform."""
    context: int | None = None
    """Longest sequence, prompt and answer together. Default: what the model was made for."""
    seed: int | None = None
    """Seed of every prompt's draws. Default: a fresh one."""
    batch_size: int = 1
    """Prompts decoded together."""
    dtype: str | None = None
    """bfloat16, float32 or float16, of weights and activations. Default: bfloat16."""
    quant: str | None = None
    """Hold the target's weights in 8 or 4 bits: a scheme such as w8a8 or w4a8-g32; keep: a GGUF file's."""
    kv_cache_dtype: str | None = None
    """Keys and values of the target: float32, bfloat16, float16, int8, int8-static, fp8, or codes of 4 or 3
    bits: rotor4, iso4, turbo4, rotor3, iso3, turbo3. Default: what its files ask for, or --dtype."""
    draft_kv_cache_dtype: str | None = None
    """Keys and values of the draft, likewise (int8-static apart). Default: the dtype of its weights."""
    speculative_config: str | None = None
    """A JSON object such as {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}."""
    speculation: Literal["adaptive", "fixed"] | None = None
    """adaptive: judge as many drafts a round as measured costs and acceptance make worth while, perhaps none;
    fixed: all of them. Default: as the library's."""
    verification: Literal["token", "block"] | None = None
    """token: each draft is accepted by itself; block: several of a chain jointly, with the same distribution
    of the text. Default: token, or as --speculative-config says."""
    ignore_eos: bool = False
    """Write on behind an end of text, to the limit."""
    aux_convention: AuxConvention | None = None
    """What layer ids in an EAGLE-3 draft's config count: hidden-state boundaries, or blocks (their output is
    meant). Default: told from the file."""
    json: bool = False
    """Print one JSON object a prompt on stdout, and nothing else there."""

    def run(self) -> int:
        """The command. Exit status 1 when some prompt could not be served."""
        config = methods.speculation(
            self.speculative_config,
            method=self.method,
            draft=self.draft,
            aux_convention=self.aux_convention,
            kv_cache_dtype=self.draft_kv_cache_dtype,
        )
        rows = self._rows(config)
        variables = parse_template_kwargs(self.chat_template_kwargs)
        sampling = Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=parse_logit_bias(self.logit_bias),
            seed=self.seed,
        )
        if self.logprobs and not self.json:
            raise ConfigError("--logprobs are printed in the objects of --json alone; add it")
        methods.check_count("--max-new-tokens", self.max_new_tokens)
        methods.check_count("--batch-size", self.batch_size)
        decoding = methods.decoding(
            config,
            sampled=self.temperature > 0,
            verification=self.verification,
            speculation=self.speculation,
        )
        target = methods.load_target(
            self.target,
            dtype=self.dtype,
            context=self.context,
            quant=self.quant,
            eos=self.eos,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        methods.say_memory(target)
        options = {
            "proposer": methods.proposer_from(target, config),
            "sampling": sampling,
            "max_new_tokens": self.max_new_tokens,
            "chat_template_kwargs": variables,
            "split_special_tokens": self.split_special_tokens,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "logprobs": self.logprobs,
            "ignore_eos": self.ignore_eos,
            **decoding,
            **methods.given(speculation=self.speculation),
        }
        if not self.json and self.prompt is not None:
            return self._stream(target, rows[0], options)
        return self._answer(target, rows, config, options)

    def _rows(self, config: SpeculativeConfig) -> list[PromptRow | BadRow]:
        if (self.prompt is None) == (self.prompts is None):
            raise ConfigError("give one of --prompt TEXT and --prompts FILE")
        predicts = methods.method_named(config.method).reads_prediction
        if predicts != (self.prediction_field is not None):
            if predicts:
                raise ConfigError(
                    f"method {config.method!r} drafts from a prediction; name its field of the prompt file "
                    "with --prediction-field"
                )
            raise ConfigError(
                f"method {config.method!r} does not use predictions, so --prediction-field means nothing"
            )
        if self.prompt is not None:
            if self.prediction_field is not None:
                raise ConfigError("--prediction-field names a field of the file that --prompts names")
            row = PromptRow(0, prompt=self.prompt, system=self.system)
            row.request([], chat=self.chat)
            return [row]
        rows = read_prompts(self.prompts or "", prediction_field=self.prediction_field)
        return [dataclasses.replace(r, system=self.system) if isinstance(r, PromptRow) else r for r in rows]

    def _answer(
        self,
        target: ej.Target,
        rows: list[PromptRow | BadRow],
        config: SpeculativeConfig,
        options: dict[str, Any],
    ) -> int:
        predicts = methods.method_named(config.method).reads_prediction
        objects = []
        with show.progress("answering", len(rows)) as advance:
            for group in in_groups(rows, self.batch_size):
                good = [row for row in group if isinstance(row, PromptRow)]
                answers = iter(
                    answer_rows(
                        target, good, chat=self.chat, predicts=predicts, batch_size=self.batch_size, **options
                    )
                )
                for row in group:
                    value = (
                        bad_row_json(row) if isinstance(row, BadRow) else answer_json(row.id, next(answers))
                    )
                    objects.append(value)
                    self._print(value)
                    advance()
        failed = [value for value in objects if "error" in value]
        if not self.json:
            self._table([(str(value["id"]), value["stats"]) for value in objects if "stats" in value])
        for value in failed:
            show.print_error(f"prompt {value['id']}: {value['error']}")
        return 1 if failed else 0

    def _print(self, value: dict[str, Any]) -> None:
        if self.json:
            show.print_json(value)
            return
        turns = value.get("turns", [value] if "text" in value else [])
        for n, turn in enumerate(turns, start=1):
            name = f"{value['id']}, turn {n}" if "turns" in value else value["id"]
            show.write_text(f"[{name}]\n{turn['text']}\n\n")

    def _stream(self, target: ej.Target, row: PromptRow | BadRow, options: dict[str, Any]) -> int:
        assert isinstance(row, PromptRow)
        for piece in ej.stream(target, row.request([], chat=self.chat), **options):
            if isinstance(piece, ej.Piece):
                show.write_text(piece.text)
            else:
                show.write_text("\n")
                self._table([(self.target, piece.stats.to_json())])
        return 0

    def _table(self, stats: list[tuple[str, dict[str, Any]]]) -> None:
        if stats:
            show.stderr().print(show.stats_table("times include compilation", stats))
            show.print_widths(stats)
            show.print_vllm(stats)
