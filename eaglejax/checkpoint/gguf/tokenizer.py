"""The tokenizer that a GGUF file describes in its metadata, without any other source.

Two kinds exist in the supported architectures: ``gpt2`` (byte-level BPE with explicit merges and a named
pre-tokenizer) and ``llama`` (SentencePiece BPE: the vocabulary's order stands for the merges, and bytes are
the fallback).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from eaglejax.checkpoint.tokenizer import END_OF_TURN, Tokenizer, make_tokenizer, of_library
from eaglejax.errors import CheckpointError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPLITS: dict[str, str] = {
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
"""``tokenizer.ggml.pre`` -> the regular expression whose matches are merged separately."""

_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Pre-tokenizers whose vocabularies take a piece that is a token as it is, before any merge."""

_BOS_UNLESS_TOLD = ("llama-bpe", "llama3", "llama-v3")
"""Pre-tokenizers that put BOS first when the file does not say."""

_SPECIALS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


_TYPES: dict[str, tuple[type, bool]] = {
    **{"tokens": (str, True), "merges": (str, True), "scores": (float, True), "token_type": (int, True)},
    **dict.fromkeys(("model", "pre"), (str, False)),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_space_prefix"), (bool, False)),
    **dict.fromkeys(("eot_token_id", "eom_token_id", *_SPECIALS.values()), (int, False)),
}
"""Entries under ``tokenizer.ggml.`` with their type, and whether they are lists of it."""


class _Vocabulary:
    """The vocabulary part of the metadata, checked."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.path, self._metadata = path, metadata
        for key, (kind, several) in _TYPES.items():
            value = self.get(key)
            values = value if several and isinstance(value, list) else [value]
            if value is not None and (
                isinstance(value, list) != several or not all(type(v) is kind for v in values)
            ):
                raise CheckpointError(
                    f"{path} is damaged: tokenizer.ggml.{key} must be "
                    + (f"a list of {kind.__name__}" if several else f"of type {kind.__name__}")
                )
        self.tokens: list[str] = self.need("tokens")
        if len(set(self.tokens)) != len(self.tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.tokens holds the same token twice")
        self.kinds: list[int] = self.get("token_type") or [gguf.TokenType.NORMAL] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise CheckpointError(
                f"{path}: {len(self.kinds)} entries of tokenizer.ggml.token_type for {len(self.tokens)} "
                "tokens"
            )
        self.pre: str = self.get("pre", "default")
        self.architecture = str(metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path} has no tokenizer.ggml.{key}: it carries no usable tokenizer")
        return value

    def special(self, key: str) -> int | None:
        """A special token's id, checked against the vocabulary."""
        value = self.get(key)
        if value is not None and not 0 <= value < len(self.tokens):
            raise CheckpointError(
                f"{self.path}: tokenizer.ggml.{key} = {value}, but there are {len(self.tokens)} tokens"
            )
        return value

    def of_kind(self, *kinds: gguf.TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]

    def ids(self) -> dict[str, int]:
        """Token -> id. Entries that only pad the embedding table are no tokens."""
        unused = gguf.TokenType.UNUSED
        return {
            t: i for i, (t, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)) if kind != unused
        }


def tokenizer_from_metadata(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Build the tokenizer; ``path`` names the file in errors.

    Raises ``CheckpointError`` for a tokenizer or pre-tokenizer that is not known and for metadata that
    contradict themselves.
    """
    vocabulary = _Vocabulary(metadata, path)
    kind = vocabulary.need("model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise CheckpointError(
            f"{path}: tokenizer model {kind!r} is not supported; supported are {sorted(builders)}"
        )
    try:
        backend = builders[kind](vocabulary)
    except CheckpointError:
        raise
    except BaseException as error:  # for a merge outside the vocabulary, say
        if not of_library(error):
            raise
        raise CheckpointError(f"{path}: the tokenizer's vocabulary is damaged: {error}") from error
    _add_tokens(backend, vocabulary)
    _surround(backend, vocabulary, default_bos=kind == "llama" or vocabulary.pre in _BOS_UNLESS_TOLD)
    specials = {
        name: vocabulary.tokens[i]
        for name, key in _SPECIALS.items()
        if (i := vocabulary.special(key)) is not None
    }
    ends = [vocabulary.special(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    eos = {i for i in ends if i is not None}
    # The file names one or two ids; the other turn-ending tokens are known by their text alone.
    named = set(vocabulary.of_kind(gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)).intersection(
        END_OF_TURN
    )
    return make_tokenizer(
        backend,
        eos=eos | {i for i, token in enumerate(vocabulary.tokens) if token in named},
        bos=vocabulary.special("bos_token_id"),
        template=_template(metadata, path),
        specials=specials,
    )


def _template(metadata: Mapping[str, Any], path: Path) -> str | None:
    value = metadata.get("tokenizer.chat_template")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{path} is damaged: tokenizer.chat_template is no text")
    return value


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    pre = vocabulary.pre
    if pre not in SPLITS:
        raise CheckpointError(
            f"{vocabulary.path}: pre-tokenizer {pre!r} is not supported; supported are {sorted(SPLITS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.need("merges")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary.ids(), merges=merges, ignore_merges=pre in _WHOLE_WORDS)  # type: ignore[arg-type]
    )
    if SPLITS[pre] is _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


_SPACE = "\u2581"


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    if vocabulary.architecture.startswith("gemma"):
        # These files list runs of spaces as they look in text, but the model's own tokenizer merges them.
        vocabulary.tokens = [_SPACE * len(t) if t and not t.strip(" ") else t for t in vocabulary.tokens]
    unknown = vocabulary.special("unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(),
            merges=_implied_merges(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = vocabulary.get("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return backend


def _implied_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Merges in the order in which SentencePiece learned them: each splits a token into two others.

    A piece's rank is its place in the vocabulary where the scores agree with that order, as they do in every
    vocabulary that SentencePiece trained; tokens that were added to one (runs of spaces, line breaks) carry
    no real score. Otherwise the score decides. Ties go to the split with the lowest ids.
    """
    mergeable = (gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED)
    ids = {
        t: i
        for i, (t, k) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if k in mergeable
    }
    scores: Sequence[float] = vocabulary.need("scores")
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{vocabulary.path}: {len(scores)} tokenizer.ggml.scores for {len(vocabulary.tokens)} tokens"
        )
    normal = [s for s, kind in zip(scores, vocabulary.kinds, strict=True) if kind == gguf.TokenType.NORMAL]
    descending = all(a >= b for a, b in itertools.pairwise(normal))
    ordered = list(ids) if descending else sorted(ids, key=lambda token: (-scores[ids[token]], ids[token]))
    merges: list[tuple[str, str]] = []
    # Both parts are tokens, so that a token far longer than all others (a few are) has few splits to look at.
    lengths = sorted({len(token) for token in ids})
    known_lengths = frozenset(lengths)
    for token in ordered:
        shorter = lengths[: bisect.bisect_left(lengths, len(token))]
        cuts = [i for i in shorter if i and len(token) - i in known_lengths]
        splits = [(token[:i], token[i:]) for i in cuts]
        known = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Tokens that are matched whole in the text, before anything else."""
    control = vocabulary.of_kind(gguf.TokenType.CONTROL)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    # A run of U+2581 is reached through merges (see _sentencepiece).
    plain = [t for t in vocabulary.of_kind(gguf.TokenType.USER_DEFINED) if t.strip(_SPACE)]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def _surround(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, *, default_bos: bool) -> None:
    """What ``encode`` puts around a text."""
    ids = {}
    for name, default in (("bos", default_bos), ("eos", False)):
        token = vocabulary.special(f"{name}_token_id")
        if vocabulary.get(f"add_{name}_token", default):
            if token is None:
                raise CheckpointError(
                    f"{vocabulary.path}: tokenizer.ggml.add_{name}_token is set without a {name}_token_id"
                )
            ids[name] = (vocabulary.tokens[token], token)
    if ids:
        first, last = ([ids[n][0]] if n in ids else [] for n in ("bos", "eos"))
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=list(ids.values())
        )
