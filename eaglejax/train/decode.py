"""Decoding a batch of token prompts, for evaluation and for regenerating answers."""

from __future__ import annotations

from collections.abc import Sequence

from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.base import Bound, Proposer
from eaglejax.models.target import Target
from eaglejax.speculate.admission import check_request
from eaglejax.speculate.generate import BatchDecoder, Generation, Request
from eaglejax.speculate.options import DecodeOptions

WHOLE = DecodeOptions(speculation="fixed")
"""All drafts are judged: acceptance is measured, and must not follow the machine."""


def decode_requests(
    target: Target, requests: Sequence[Request], proposer: Proposer | Bound | None = None, *, batch: int
) -> list[Generation]:
    """One Generation a request, decoded together in ``batch`` rows. Raises RequestError for one that cannot
    be served."""
    for request in requests:
        check_request(request, target.context, target.config.vocab_size)
    bound = proposer if isinstance(proposer, Bound) else Bound(proposer or Autoregressive())
    decoder = BatchDecoder(target, bound.proposer, bound.params, requests, batch=batch, options=WHOLE)
    for _ in decoder:
        pass
    return decoder.results()
