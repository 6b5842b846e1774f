"""Names of the intermediate tensors that a JAX run and a torch run both record.

A name says when, in which model, where and what::

    prefill/0/target/embedding
    round/3/target/layers/5/attention
    round/3/draft/step/2/layers/0/mlp
    round/3/draft/tree/tokens
    round/3/verify/path

``prefill/i`` is the i-th prompt chunk, ``round/i`` the i-th round (both from 0). ``draft/observe`` is the
draft's forward over committed pairs, ``draft/step/s`` its forward over the nodes at depth s (step 0: the
root's children come from the last observed state, so it has logits alone). Within one stage a run records in
the order of its arithmetic; ``OPERATIONS`` lists it.
"""

from __future__ import annotations

import dataclasses

from eaglejax.errors import ConfigError

STAGES = ("prefill", "round")

LAYER_OPERATIONS = {
    "attn_norm": "[B, N, H] what the projections read",
    "q": "[B, N, Hq, d] queries after their norm and rotation",
    "k": "[B, N, Hkv, d] keys after their norm and rotation",
    "v": "[B, N, Hkv, d] values",
    "attention": "[B, N, Hq, d] mixed values, before the output projection",
    "attn_out": "[B, N, H] what attention adds to the residual stream (closing norm included)",
    "attn_residual": "[B, N, H] residual stream after attention",
    "mlp_norm": "[B, N, H] what the feed-forward block reads",
    "mlp": "[B, N, H] what it adds to the residual stream (closing norm included)",
    "residual": "[B, N, H] residual stream after the layer (hidden-state boundary layer + 1)",
}
"""Operations of a layer, of the target and of the draft alike, in order."""

OPERATIONS = {
    "target": {
        "tokens": "[B, N] int32 input tokens",
        "positions": "[B, N] int32",
        "visible": "[B, N, N] bool which of the new tokens each new token sees",
        "embedding": "[B, N, H] scaled embedding (hidden-state boundary 0)",
        "layers": "see LAYER_OPERATIONS",
        "final_norm": "[B, N, H] post-final-norm hidden state",
        "aux": "[B, N, A, H] hidden-state boundaries that the draft reads",
        "logits": "[B, N, V] f32, softcap included (prefill: [B, 1, V], of the last real token)",
    },
    "observe": {
        "feature": "[B, M, H] feature of each committed token: fc over the joined boundaries (EAGLE-3) or "
        "the target's hidden state (EAGLE-1); zero past the row's count",
        "embedding": "[B, M, H] embedding of the following tokens",
        "fc": "[B, M, H] EAGLE-1's mix of embedding and feature (EAGLE-3 has none here)",
        "layers": "see LAYER_OPERATIONS",
        "state": "[B, M, H] what is fed to the next step",
    },
    "step": {
        "feature": "[B, n, H] the parents' states",
        "embedding": "[B, n, H] embedding of the level's tokens",
        "fc": "[B, n, H] EAGLE-1's mix of embedding and feature (EAGLE-3 has none here)",
        "layers": "see LAYER_OPERATIONS",
        "state": "[B, n, H] the level's states",
        "logits": "[B, n, Vd] f32 (step 0: n = 1)",
    },
    "tree": {
        "tokens": "[B, N] int32 target ids, root included",
        "parent": "[B, N] int32",
        "depth": "[B, N] int32",
        "valid": "[B, N] bool, as the target sees it (nodes past the budget are cut)",
        "scores": "[B, N] f32 cumulative log-probabilities, 0 at the root",
    },
    "verify": {
        "path": "[B, D+1] int32 nodes kept",
        "accepted": "[B] int32 drafts kept, before the cut at an end or the budget",
        "tokens": "[B, D+1] int32 (prefill: [B, 1]) tokens to emit",
        "count": "[B] int32 how many of them are emitted",
    },
}
"""Operations of each part, in order, with the shape recorded."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor of a run stands; ``str`` gives its name, :func:`parse` reads one.

    ``stage``: "prefill" or "round", the ``index``-th. ``part``: a key of ``OPERATIONS``. ``step``: the
    draft's level (part "step" alone). ``layer``: for the operations of a layer.
    """

    stage: str
    index: int
    part: str
    operation: str
    step: int | None = None
    layer: int | None = None

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ConfigError(f"stage {self.stage!r} of a tensor's name must be one of {', '.join(STAGES)}")
        if self.part not in OPERATIONS:
            raise ConfigError(f"part {self.part!r} of a tensor's name must be one of {', '.join(OPERATIONS)}")
        if (self.step is not None) != (self.part == "step"):
            raise ConfigError(f"a step belongs to the draft's levels; {self.part!r} was given {self.step!r}")
        layered = "layers" in OPERATIONS[self.part]
        if self.layer is not None and not layered:
            raise ConfigError(f"{self.part!r} has no layers but {', '.join(OPERATIONS[self.part])}")
        known = LAYER_OPERATIONS if self.layer is not None else OPERATIONS[self.part]
        if self.operation not in known or self.operation == "layers":
            raise ConfigError(
                f"operation {self.operation!r} of {self.part!r} is not recorded; known are {', '.join(known)}"
            )

    def __str__(self) -> str:
        parts: list[str | int] = [self.stage, self.index]
        parts += ["draft"] if self.part in ("observe", "step", "tree") else []
        parts += [self.part]
        parts += [self.step] if self.step is not None else []
        parts += ["layers", self.layer] if self.layer is not None else []
        return "/".join(map(str, [*parts, self.operation]))


def parse(text: str) -> Place:
    """The place that a name stands for; raises ConfigError where it is none."""
    rest = text.split("/")
    try:
        stage, index = rest[0], int(rest[1])
        rest = rest[3:] if rest[2] == "draft" else rest[2:]
        part, rest = rest[0], rest[1:]
        step = layer = None
        if part == "step":
            step, rest = int(rest[0]), rest[1:]
        if rest[0] == "layers":
            layer, rest = int(rest[1]), rest[2:]
        (operation,) = rest
    except (IndexError, ValueError) as error:
        raise ConfigError(f"{text!r} is no tensor's name, like round/3/target/layers/5/q") from error
    place = Place(stage, index, part, operation, step=step, layer=layer)
    if str(place) != text:
        raise ConfigError(f"{text!r} is no tensor's name; {place} is")
    return place
