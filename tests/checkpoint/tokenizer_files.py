"""Tokenizers in GGUF files and in folders, for tests."""

from __future__ import annotations

import json

import gguf
import gguf_export
import transformers

from eaglejax.checkpoint.gguf.reader import GGUFFile
from eaglejax.checkpoint.gguf.tokenizer import tokenizer_from_metadata
from eaglejax.checkpoint.tokenizer import Tokenizer

TEXTS = [
    "hello world 1234",
    "  two  spaces\n\n\ttab\r\nend ",
    "你好，世界！",
    "def f(x):\n    return x**2  # it's",
    "😀 👩‍👩‍👧 é ñ",
    "<|im_start|>user\nhello<|im_end|>",
    "",
    " ",
]
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]


def write(path, add_tokenizer, architecture="llama", **metadata):
    writer = gguf.GGUFWriter(path, architecture)
    add_tokenizer(writer)
    for key, value in metadata.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    # transformers wants some architecture around a tokenizer.
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{key}")(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path) -> Tokenizer:
    return tokenizer_from_metadata(GGUFFile(path).metadata, path)


def byte_level(writer, pre="llama-bpe"):
    gguf_export.add_byte_level_tokenizer(writer, 280, pre)


SPACE = "\u2581"
PIECES = ["he", "ll", "hell", "hello", f"{SPACE}w", "or", f"{SPACE}wor", "ld", f"{SPACE}world"]
LETTERS = [SPACE, *"abcdefghijklmnopqrstuvwxyz"]


def sentencepiece(writer):
    """As SentencePiece trains it: specials, bytes, runs added later, pieces by merge rank, letters."""
    kind = gguf.TokenType
    rows = [("<unk>", 0.0, kind.UNKNOWN), ("<s>", 0.0, kind.CONTROL), ("</s>", 0.0, kind.CONTROL)]
    rows += [(f"<0x{b:02X}>", 0.0, kind.BYTE) for b in range(256)]
    rows += [(t, -1000.0, kind.USER_DEFINED) for t in ("  ", "   ", "\n\n", "<end_of_turn>")]
    rows += [(p, -float(i), kind.NORMAL) for i, p in enumerate([*PIECES, *LETTERS])]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    tokens, scores, kinds = map(list, zip(*rows, strict=True))
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def save_folder(tmp_path, **config):
    """A folder as transformers writes it."""
    backend = read(write(tmp_path / "t.gguf", byte_level)).backend
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|endoftext|>"
    )
    fast.chat_template = gguf_export.TEMPLATE
    folder = tmp_path / "model"
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, fast
