"""The tokenizer of a target: ids, text and chat template, whatever kind of file they came from.

Only the ``tokenizers`` library and jinja2 run here. ``transformers``, whose import takes seconds, is asked
only for a folder that has no ``tokenizer.json``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from eaglejax.checkpoint import chat_template as templates
from eaglejax.checkpoint.files import read_json, read_text, refuse_pointer
from eaglejax.conversation import Conversation, read_messages
from eaglejax.errors import CheckpointError, ConfigError, RequestError

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>")
"""Tokens that end an assistant's turn in the chat formats of the supported families."""


_ANCHOR = "\U0010fffd"
"""A text of one private character, in front of what is encoded as the middle of a text."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text <-> ids.

    ``eos_ids``: every id that ends a text, ascending. ``bos_id``: None where the model has none.
    ``chat_template``: jinja source or None. ``specials``: the named special tokens that templates refer to
    (``bos_token``...).
    """

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    chat_template: str | None = None
    specials: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id; the model's own vocabulary may be padded beyond it."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens: they steer the model and are no part of a text."""
        return frozenset(i for i, t in self.backend.get_added_tokens_decoder().items() if t.special)

    @functools.cached_property
    def hash(self) -> str:
        """Fingerprint of what every id means: SHA-256 over the sorted (id, token) pairs, hexadecimal.

        Two tokenizers with the same fingerprint give every id the same text, whatever files they were read
        from.
        """
        pairs = sorted((i, token) for token, i in self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(pairs, ensure_ascii=True).encode()).hexdigest()

    def with_eos(self, names: Sequence[int | str]) -> Tokenizer:
        """The tokenizer with further tokens, ids or their text, that end a text. Raises ConfigError for one
        that it does not know."""
        found = set(self.eos_ids)
        for name in names:
            token = self.backend.token_to_id(name) if isinstance(name, str) else name
            if (
                isinstance(token, bool)
                or not isinstance(token, int)
                or not 0 <= token < self.vocab_size
                or self.backend.id_to_token(token) is None
            ):
                raise ConfigError(
                    f"eos names {name!r}, which is no token of this model; give a token's text or an id from "
                    f"0 to {self.vocab_size - 1}"
                )
            found.add(token)
        return dataclasses.replace(self, eos_ids=tuple(sorted(found)))

    @functools.cached_property
    def _splitting(self) -> tokenizers.Tokenizer:
        """The same, but control tokens that a text spells are text. It also knows a token that stands for
        none, ``_ANCHOR``, behind which a text is encoded as one that something precedes."""
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.add_tokens([tokenizers.AddedToken(_ANCHOR, normalized=False, special=False)])
        copy.encode_special_tokens = True
        return copy

    @functools.cached_property
    def _controls(self) -> tuple[re.Pattern[str], dict[str, tuple[int, tokenizers.AddedToken]]]:
        """A pattern of all control tokens as they are spelled, the longest first; ids and tokens by text."""
        added = self.backend.get_added_tokens_decoder()
        tokens = {t.content: (i, t) for i, t in added.items() if t.special}
        spelled = sorted(filter(None, tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spelled)) or r"(?!)"), tokens

    def encode(self, text: str, *, special: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Ids of ``text``. ``special`` adds the tokens that the model expects around a text (a leading BOS,
        say); control tokens that are spelled out in ``text`` are recognised either way, unless
        ``split_special_tokens`` takes them for text. Raises ``RequestError`` for a text that UTF-8 cannot
        hold (JSON can spell half a surrogate pair)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is no valid Unicode: character {error.start} is {text[error.start]!r}, half of a "
                "surrogate pair"
            ) from error
        backend = self._splitting if split_special_tokens else self.backend
        return backend.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of ``ids``; no spaces are tidied up. Bytes that form no UTF-8 become U+FFFD; ids that stand
        for no token (the padding of an embedding table) give no text. ``skip_special`` leaves out control
        tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """``messages`` (as ``conversation.read_messages`` reads them) as text by the chat template;
        ``variables`` are handed to it.

        Raises ``RequestError`` when there is no template, the messages are no such list or the template
        rejects them.
        """
        if self.chat_template is None:
            raise RequestError(
                "this model comes without a chat template; give a plain prompt instead of messages"
            )
        given = {"tools": None, "documents": None, **self.specials, **variables}
        return templates.render(
            self.chat_template,
            read_messages(messages),
            {**given, "add_generation_prompt": add_generation_prompt},
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of ``render_chat``; the template writes BOS itself where the model wants one."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, special=False)

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = True) -> str:
        """``conversation`` as text by the chat template. Raises RequestError as ``render_chat`` does, and for
        a variable that the template does not read, which would change nothing."""
        read = None if self.chat_template is None else templates.variables_read(self.chat_template)
        if read is not None and (unread := sorted(set(conversation.variables) - read)):
            raise RequestError(
                f"this model's chat template does not read {unread[0]!r}; it reads "
                f"{', '.join(sorted(read - {'messages', 'add_generation_prompt'})) or 'messages alone'}"
            )
        return self.render_chat(
            conversation.messages, add_generation_prompt=add_generation_prompt, **conversation.variables
        )

    def encode_conversation(
        self, conversation: Conversation, *, split_special_tokens: bool = False
    ) -> list[int]:
        """Ids of ``conversation`` with what asks for the next answer behind it. Raises as ``render`` does.

        ``split_special_tokens``: control tokens in the conversation (its messages, tools, documents) are
        text; those of the template itself are not.
        """
        if not split_special_tokens:
            return self.encode(self.render(conversation), special=False)
        pattern, _ = self._controls
        spelled = sorted(set(pattern.findall("\0".join(conversation.texts()))))
        if not spelled:
            return self.encode(self.render(conversation), special=False)
        # While the template writes its own, those of the conversation are single private characters.
        free = (chr(c) for c in range(0xF0000, 0xFFFFE) if not any(chr(c) in t for t in conversation.texts()))
        marks = dict(zip(spelled, free, strict=False))
        marked = conversation.map_texts(lambda text: pattern.sub(lambda found: marks[found[0]], text))
        return self._encode_marked(self.render(marked), {mark: text for text, mark in marks.items()})

    def _encode_marked(self, text: str, marks: Mapping[str, str]) -> list[int]:
        """Ids of ``text``, in which control tokens are recognised, and ``marks`` (private character -> text)
        stand for text."""
        pattern, controls = self._controls
        ids: list[int] = []
        at, strip = 0, False
        for found in [*pattern.finditer(text), None]:
            here, token = (None, None) if found is None else controls[found[0]]
            plain = text[at : len(text) if found is None else found.start()]
            plain = plain.lstrip() if strip else plain
            plain = plain.rstrip() if token is not None and token.lstrip else plain
            plain = "".join(marks.get(c, c) for c in plain)
            if plain:
                behind = [] if at == 0 else [_ANCHOR]
                parts = self.encode("".join([*behind, plain]), special=False, split_special_tokens=True)
                ids += parts[len(behind) :]
            if found is not None and here is not None and token is not None:
                ids.append(here)
                at, strip = found.end(), token.rstrip
        return ids

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, which ``load_tokenizer`` and transformers
        read."""
        self.backend.save(str(folder / "tokenizer.json"), pretty=False)
        config = {**self.specials, "chat_template": self.chat_template, "eos_token_id": list(self.eos_ids)}
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, ensure_ascii=False), encoding="utf-8"
        )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face folder.

    The named tokens (``bos_token``...) are those that transformers takes: of ``tokenizer_config.json``, and
    of ``special_tokens_map.json`` where the former lists no ``added_tokens_decoder``. EOS ids: those of
    ``generation_config.json`` and ``config.json``, the ``eos_token``, and the turn-ending tokens that the
    chat template mentions. Raises ``CheckpointError`` when files are missing or damaged.
    """
    settings = read_json(folder / "tokenizer_config.json", default={})
    older = read_json(folder / "special_tokens_map.json", default={})
    backend = _backend(folder)
    template = _template(folder, settings)
    specials = _named(settings if "added_tokens_decoder" in settings else settings | older)
    eos: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        values = read_json(folder / name, default={})
        for found in (values, values.get("text_config")):
            if isinstance(found, Mapping):
                eos |= _ids(found.get("eos_token_id"), folder / name)
    eos |= _ids(settings.get("eos_token_id"), folder / "tokenizer_config.json")
    if "eos_token" in (named := _named(older)):
        eos |= {i for i in [backend.token_to_id(named["eos_token"])] if i is not None}
    bos = read_json(folder / "config.json", default={}).get("bos_token_id")
    if "bos_token" in specials:
        bos = backend.token_to_id(specials["bos_token"])
    return make_tokenizer(backend, eos=eos, bos=bos, template=template, specials=specials)


def _named(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a file names, each as its text or as an object with its ``content``."""
    texts = {
        key: value.get("content") if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key.endswith("_token")
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def make_tokenizer(
    backend: tokenizers.Tokenizer,
    *,
    eos: set[int],
    bos: int | None,
    template: str | None,
    specials: Mapping[str, str],
) -> Tokenizer:
    """A ``Tokenizer`` whose EOS ids also hold the ``eos_token`` and the turn-ending tokens of the chat
    template."""
    names = [specials["eos_token"]] if "eos_token" in specials else []
    names += [token for token in END_OF_TURN if template and token in template]
    named = {backend.token_to_id(name) for name in names}
    return Tokenizer(
        backend=backend,
        eos_ids=tuple(sorted(eos | {i for i in named if i is not None})),
        bos_id=bos,
        chat_template=template,
        specials=dict(specials),
    )


def of_library(error: BaseException) -> bool:
    """Whether tokenizers raised it: bare Exception, or a panic of its Rust code, which is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        refuse_pointer(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except BaseException as error:
            if not of_library(error):
                raise
            raise CheckpointError(
                f"{path} is damaged or newer than tokenizers {tokenizers.__version__}: {error}"
            ) from error
        ids = backend.get_vocab(with_added_tokens=False).values()
        if len(set(ids)) < len(ids):
            # Which of the two an id means would be another in every process.
            raise CheckpointError(f"{path} is damaged: its vocabulary has two tokens of one id")
        backend.no_truncation()
        backend.no_padding()
        return backend
    if not any(
        (folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "tokenizer_config.json")
    ):
        raise CheckpointError(
            f"{folder} holds no tokenizer: tokenizer.json, tokenizer.model and vocab.json are missing"
        )
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} has no tokenizer.json and transformers cannot build one: {error}"
        ) from error


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):
        # Several named templates: [{"name", "template"}].
        named = [t for t in template if isinstance(t, Mapping) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {template!r:.80}; it is a text"
        )
    return template


def _ids(value: Any, path: Path) -> set[int]:
    """Token ids that a file gives as one number or a list; those below 0 stand for none."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    bad = [v for v in values if isinstance(v, bool) or not isinstance(v, int)]
    if bad:
        raise CheckpointError(f"{path}: eos_token_id is {value!r}; it is a token id or a list of them")
    return {v for v in values if v >= 0}
