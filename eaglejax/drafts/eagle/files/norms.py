"""Where a draft's norms stand, by keys whose meaning differs between producers."""

from __future__ import annotations

import numpy as np

from eaglejax.drafts.eagle.files.settings import KEY
from eaglejax.drafts.eagle.files.shapes import Shapes

_HEAD = "norm.weight"


def state_norms(file: Shapes) -> tuple[bool, bool, tuple[str, ...]]:
    """(norm before the head, state fed back behind it, tensors that stay unused) of an EAGLE-3 draft.

    ``norm_output`` and modelopt's ``return_hidden_post_norm`` mean that the normalised state is fed back; the
    head reads it either way. For some months of 2026 SpecForge's ``norm_output`` meant the norm before the
    head instead, on or off. Off shows in the weights: a norm that was switched off was never trained. On does
    not, and is read as everybody else means it. eaglejax's own block settles either.
    """
    keys = ("norm_output", "return_hidden_post_norm")
    said = {key: flag for key in keys if (flag := file.flag(key)) is not None}
    if len(set(said.values())) > 1:
        file.fail(f"config.json says {' and '.join(said)} and not the same; one of them is to go")
    key, fed = next(iter(said.items()), ("norm_output", None))
    if "head_norm" in file.settings:
        head_norm = bool(file.settings["head_norm"])
        return head_norm, bool(file.settings.get("feed_normed", fed and head_norm)), _unused(file, head_norm)
    if file.flag("use_last_layernorm", True) is False:
        if file.has(_HEAD):
            file.fail(f"config.json says use_last_layernorm: false, but the file holds {_HEAD}")
        return False, False, ()
    if fed is False and not file.speculators and _bare(file):
        file.notes.append(
            f"norm_output: false, and {_HEAD} was never trained: SpecForge wrote such drafts, without a norm "
            "before the head, in some months of 2026; it runs without"
        )
        return False, False, _unused(file, False)
    if fed and not file.speculators and list(said) == ["norm_output"]:
        file.notes.append(
            "norm_output: true means that the normalised state is fed back; if SpecForge wrote this draft "
            "between May and September 2026 it meant the norm before the head alone, which is "
            f'"{KEY}": {{"feed_normed": false}} (`eaglejax diagnose` tries both)'
        )
    elif fed is False and not file.speculators:
        file.notes.append(f"{key}: false means that the state before the norm is fed back, as usual")
    return True, bool(file.settings.get("feed_normed", fed)), ()


def residual(file: Shapes) -> bool:
    """Whether the first layer's residual is the normalised feature; silent speculators files mean that it
    is."""
    said = file.flag("norm_before_residual")
    if said is None and file.speculators:
        file.notes.append(
            "config.json has no norm_before_residual, which readers of the speculators form take for true"
        )
        return True
    return bool(said)


def _unused(file: Shapes, head_norm: bool) -> tuple[str, ...]:
    return () if head_norm or not file.has(_HEAD) else (_HEAD,)


def _bare(file: Shapes) -> bool:
    """Whether the norm before the head is still as it was initialised where others are not."""
    others = ("layers.0.hidden_norm.weight", "layers.0.post_attention_layernorm.weight")
    trained = any(file.has(n) and np.any(np.asarray(file.store.array(n)) != 1) for n in others)
    return trained and file.has(_HEAD) and bool(np.all(np.asarray(file.store.array(_HEAD)) == 1))
