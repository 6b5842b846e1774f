"""``eaglejax regenerate``: the target's own answers to a file of prompts, as training rows."""

from __future__ import annotations

import dataclasses

from eaglejax.checkpoint.sources import resolve
from eaglejax.cli import methods, show
from eaglejax.config import parse_template_kwargs
from eaglejax.drafts.places import draft_path
from eaglejax.sampling_settings import Sampling


@dataclasses.dataclass(frozen=True)
class Regenerate:
    """Let a target answer prompts and keep the exact token ids, ready for `eaglejax train`."""

    target: str
    """The model: `demo`, a folder, a .gguf file or a Hub id."""
    prompts: str
    """A JSON Lines file with turns, prompt, messages or conversations, perhaps with tools beside them."""
    out: str
    """The file of answers; one that exists is completed."""
    draft: str | None = None
    """An EAGLE draft that makes it faster; the answers' distribution stays the target's."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this probability; 1 keeps all."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 keeps all."""
    max_new_tokens: int = 400
    """Most tokens of an answer."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out."""
    turns: int = 1
    """Most questions of one row, each asked on top of the target's own earlier answers."""
    batch_size: int = 8
    """Rows decoded together."""
    limit: int | None = None
    """Read this many rows at most."""
    seed: int = 0
    """Another seed gives other samples."""
    chat_template_kwargs: str | None = None
    """What the chat template reads beside the messages, a JSON object such as {"enable_thinking": false}; a
    row's own "chat_template_kwargs" go before."""
    dtype: str | None = None
    """bfloat16, float32 or float16, of weights and activations. Default: bfloat16."""
    eos: tuple[str, ...] = ()
    """Further tokens, texts or ids, that end every text, for models whose files name none."""
    quant: str | None = None
    """Hold the target's weights in 8 or 4 bits: a scheme such as w8a8 or w4a8-g32; keep: a GGUF file's."""
    json: bool = False
    """Print one JSON object on stdout at the end, and nothing else there."""

    def run(self) -> int:
        """The command. Exit status 1 when some row failed."""
        Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        for name in ("max_new_tokens", "max_prompt_tokens", "turns", "batch_size", "limit"):
            methods.check_count(f"--{name.replace('_', '-')}", getattr(self, name))
        resolve(self.target)
        if self.draft is not None:
            draft_path(self.draft)
        from eaglejax.checkpoint.files import progress
        from eaglejax.drafts.registry import load_draft
        from eaglejax.train.regenerate import RegenerateOptions, error_file, read_prompt_rows, regenerate

        fields = {f.name for f in dataclasses.fields(RegenerateOptions)}
        given = dataclasses.asdict(self) | {
            "chat_template_kwargs": parse_template_kwargs(self.chat_template_kwargs)
        }
        options = RegenerateOptions(**{k: v for k, v in given.items() if k in fields})
        target = methods.load_target(self.target, dtype=self.dtype, quant=self.quant, eos=self.eos)
        proposer = None if self.draft is None else load_draft(self.draft, target)
        tokens = 0
        with progress("answers", self.limit) as bar:

            def advance(answers: int, count: int) -> None:
                nonlocal tokens
                tokens += count
                bar(answers)

            counts = regenerate(
                target,
                read_prompt_rows(self.prompts),
                self.out,
                options,
                proposer=proposer,
                limit=self.limit,
                advance=advance,
            )
        if self.json:
            show.print_json({**dataclasses.asdict(counts), "tokens": tokens})
        else:
            show.print_note(
                f"{counts.written} answers ({tokens} tokens) written to {self.out}, {counts.known} were "
                "there, "
                f"{counts.too_long} prompts too long, {counts.failed} failed"
                + (f" (why: {error_file(self.out)})" if counts.failed else "")
            )
        return 1 if counts.failed else 0
