"""One engine in one mode, in a process of its own: reads requests from stdin, writes answers to stdout.

It is started with the engine's own interpreter and imports nothing of eaglejax but where that is the engine.
A line in is ``{"prompt": [ids], "tokens": N}``; a line out ``{"tokens": [ids], "first": s, "seconds": s}``:
N greedy tokens whether or not the text ends before, the seconds to the first and to the last. The first line
out says that the model is loaded: ``{"engine": ..., "version": ...}``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Answer = Iterator[list[int]]
"""Tokens as they come, at least one at a time."""


def eaglejax(file: str, options: dict[str, Any]) -> Callable[[list[int], int], Answer]:
    """``options``: ``dtype``, ``draft``, ``method``, ``speculation``."""
    import eaglejax as ej
    from eaglejax.cli import methods

    target = ej.load_target(file, dtype=options.get("dtype"), quant=options.get("quant"))
    config = methods.speculation(None, method=options.get("method"), draft=options.get("draft"))
    proposer = methods.proposer_from(target, config)
    speculation = options.get("speculation")

    def answer(prompt: list[int], count: int) -> Answer:
        told = {"max_new_tokens": count, "ignore_eos": True, "rounds_a_chunk": 16}
        for piece in ej.stream(target, prompt, proposer=proposer, speculation=speculation, **told):
            if isinstance(piece, ej.Piece) and piece.token_ids:
                yield list(piece.token_ids)

    return answer


def llama(file: str, options: dict[str, Any]) -> Callable[[list[int], int], Answer]:
    """llama.cpp through llama-cpp-python. ``options``: ``threads``; ``lookup``: tokens that its prompt
    look-up drafts; ``ngram``: the longest n-gram that it looks up."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = None
    if options.get("lookup"):
        draft = LlamaPromptLookupDecoding(options.get("ngram", 3), options["lookup"])
    threads = options["threads"]
    model = Llama(
        file, n_ctx=4096, n_threads=threads, n_threads_batch=threads, draft_model=draft, verbose=False
    )

    def answer(prompt: list[int], count: int) -> Answer:
        model.reset()
        model._ctx.kv_cache_clear()
        for n, token in enumerate(model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0), 1):
            yield [int(token)]
            if n == count:
                return

    return answer


def transformers(file: str, options: dict[str, Any]) -> Callable[[list[int], int], Answer]:
    """Hugging Face transformers, the file dequantised by its own loader. ``options``: ``threads``,
    ``dtype``; ``lookup``: tokens that its prompt look-up drafts; ``assistant``: a folder with a smaller model
    that drafts."""
    import queue
    import threading

    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options["threads"])
    folder, name = os.path.split(file)
    dtype = getattr(torch, options["dtype"])
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype).eval()
    how: dict[str, Any] = {}
    if options.get("lookup"):
        how["prompt_lookup_num_tokens"] = options["lookup"]
    if options.get("assistant"):
        how["assistant_model"] = AutoModelForCausalLM.from_pretrained(
            options["assistant"], dtype=dtype
        ).eval()

    class Streamer:
        """Hands tokens on; the first call brings the prompt."""

        def __init__(self) -> None:
            self.tokens: queue.Queue[list[int] | None] = queue.Queue()
            self.begun = False

        def put(self, value: Any) -> None:
            if self.begun:
                self.tokens.put(value.reshape(-1).tolist())
            self.begun = True

        def end(self) -> None:
            self.tokens.put(None)

    def answer(prompt: list[int], count: int) -> Answer:
        streamer, ids = Streamer(), torch.tensor([prompt])

        def run() -> None:
            try:
                with torch.inference_mode():
                    model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        do_sample=False,
                        num_beams=1,
                        repetition_penalty=1.0,
                        max_new_tokens=count,
                        min_new_tokens=count,
                        streamer=streamer,
                        **how,
                    )
            finally:
                streamer.tokens.put(None)

        thread = threading.Thread(target=run)
        thread.start()
        while (some := streamer.tokens.get()) is not None:
            yield some
        thread.join()

    return answer


ENGINES = {
    "eaglejax": (eaglejax, "eaglejax"),
    "llama": (llama, "llama_cpp_python"),
    "transformers": (transformers, "transformers"),
}


def main() -> None:
    """``worker.py ENGINE FILE OPTIONS``, the options as JSON."""
    engine, file, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    # What libraries print must not come between the answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    load, package = ENGINES[engine]
    answer = load(file, options)
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    print(json.dumps({"engine": engine, "version": version}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        tokens: list[int] = []
        begin, first = time.perf_counter(), 0.0
        for some in answer(request["prompt"], request["tokens"]):
            first = first or time.perf_counter() - begin
            tokens += some
        seconds = time.perf_counter() - begin
        told = {"tokens": tokens[: request["tokens"]], "first": first, "seconds": seconds}
        print(json.dumps(told), file=out, flush=True)


if __name__ == "__main__":
    main()
