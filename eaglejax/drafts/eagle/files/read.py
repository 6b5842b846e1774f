"""Understanding an EAGLE checkpoint: from tensors and a config.json to an ``EagleConfig``.

Shapes come from the tensors, because published configs are wrong about them (layer counts, head sizes,
vocabularies); the config is asked only for what no shape can tell: head counts, rotary settings, norm order,
feature layers. Every choice that a reader could doubt is kept as a note.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eaglejax.checkpoint.files import read_json
from eaglejax.config import AuxConvention
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files import masks, norms, parts
from eaglejax.drafts.eagle.files.keys import AUX_KEY
from eaglejax.drafts.eagle.files.names import PlainStore
from eaglejax.drafts.eagle.files.settings import KEY
from eaglejax.drafts.eagle.files.shapes import Shapes
from eaglejax.drafts.eagle.files.vocabulary import rising, target_ids
from eaglejax.drafts.files import DraftFiles
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.naming import known_name


@dataclasses.dataclass(frozen=True)
class DraftFile:
    """A draft checkpoint as understood.

    ``store``: its tensors by plain name; ``raw``: its config.json; ``ids`` [Vd] int64: target id of each
    draft id, or None when they are the same; ``layout``: which producer's form it has; ``unused``: tensors
    that the configuration switches off; ``notes``: choices made, one sentence each; ``doubts``: those of them
    that may mean another draft.
    """

    path: Path
    config: EagleConfig
    store: PlainStore
    raw: Mapping[str, Any]
    ids: np.ndarray | None
    layout: str
    unused: tuple[str, ...]
    notes: tuple[str, ...]
    doubts: tuple[str, ...]


def read_draft(
    folder: Path | DraftFiles,
    *,
    aux_convention: AuxConvention = "auto",
    aux: tuple[int, ...] | None = None,
    method: Literal["auto", "eagle1", "eagle3"] = "auto",
) -> DraftFile:
    """Understand the checkpoint in ``folder``, or in one that is open already.

    ``aux_convention`` says what layer ids in its config count; ``aux`` replaces them by boundaries.
    ``method``: refuse a checkpoint of the other kind. Raises CheckpointError or ConfigError that names what
    is missing, contradictory or not an EAGLE draft.
    """
    files = folder if isinstance(folder, DraftFiles) else DraftFiles(str(folder), Path(folder))
    raw = read_json(files.path / "config.json") if not files.raw else files.raw
    if raw.get("quantization_config"):
        raise CheckpointError(
            f"{files.path} holds quantised weights, which are not read; use the unquantised draft"
        )
    store = PlainStore(files.tensors, str(files.path))
    return _Reader(files.path, raw, store).read(aux_convention, aux, method)


class _Reader(Shapes):
    """One pass over a checkpoint."""

    def read(self, convention: AuxConvention, override: tuple[int, ...] | None, method: str) -> DraftFile:
        if any(re.search(r"\.(q_a_proj|kv_a_proj_with_mqa|kv_b_proj)\.", n) for n in self.store.names()):
            self.fail(
                "its attention is multi-head latent attention (DeepSeek form), which drafts here do not have"
            )
        query, out = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight"
        (q_out, wide), (hidden, o_in) = self.matrix(query), self.matrix(out)
        if o_in != q_out:
            self.fail(f"{out} reads {o_in} values but {query} makes {q_out}")
        if wide not in (hidden, 2 * hidden):
            self.fail(f"{query} reads {wide} values; EAGLE-1 reads {hidden} (H), EAGLE-3 {2 * hidden} (2H)")
        version = 3 if wide == 2 * hidden else 1
        kind = known_name(method, ("auto", "eagle1", "eagle3"))
        if kind is None:
            raise ConfigError(f"method {method!r} is not known; it is auto, eagle1 or eagle3")
        if kind not in ("auto", f"eagle{version}"):
            raise ConfigError(
                f"{self.folder} holds an EAGLE-{version} draft (its first layer reads {wide} values, "
                f"H is {hidden}); it cannot run as {method}"
            )
        if self.whole("hidden_size") not in (None, hidden):
            self.fail(f"config.json says hidden_size {self.whole('hidden_size')}, the tensors have {hidden}")
        fc_in = self._fc_in(version, hidden)
        heads = self.heads(q_out)
        vocab, draft_vocab, ids = self._vocabulary(version, hidden)
        shared: dict[str, Any] = {
            "version": version,
            "vocab_size": vocab,
            "draft_vocab_size": draft_vocab,
            "hidden_size": hidden,
            **self.mlp(),
            **heads,
            "num_layers": self.layers(),
            "norm_eps": self.number("rms_norm_eps", 1e-6),
            "rope": self.rope(),
            "activation": self.activation(),
            **parts.switches(self, version),
            "own_head": self.has("lm_head.weight"),
            "target_rows": self.settings.get("head") == "target_rows",
            "embed_scale": self.settings.get("embed_scale"),
            "softcap": self.settings.get("softcap"),
            "basis": self.settings.get("basis"),
            "mask_id": masks.mask_token(self, version),
        }
        unused: tuple[str, ...] = ()
        if version == 1:
            specific: dict[str, Any] = {"target_hidden_size": hidden}
        else:
            specific, unused = self._third(hidden, fc_in, convention, override)
        config = EagleConfig(**shared, **specific, windows=self.windows(shared["num_layers"]))
        self._note_borrowing(config)
        if self.own_form and "own_embedding" not in self.settings:
            self.notes.append(
                "an earlier eaglejax wrote this draft, without a record of its optional parts: a lost one "
                "would not be missed (`eaglejax convert --to eaglejax` writes the record)"
            )
        return DraftFile(
            self.folder,
            config,
            self.store,
            self.raw,
            ids,
            self._layout(version),
            unused,
            tuple(self.notes),
            tuple(self.doubts),
        )

    def _fc_in(self, version: int, hidden: int) -> int:
        """Rows of ``fc``; 0 where there is none, because the first layer reads the target's last state."""
        key = "use_aux_hidden_state"
        fused = self.flag(key, True)
        if version == 1:
            fc_out, fc_in = self.matrix("fc.weight")
            if fc_in != 2 * hidden:
                self.fail(f"fc.weight reads {fc_in} values; an EAGLE-1 draft's reads {2 * hidden}")
            if fused is False and self.has("layers.0.input_layernorm.weight"):
                self.fail(
                    f"{key} is false and the first layer has an input_layernorm: an EAGLE-1 draft with the "
                    "norms of an MTP module, which drafts here do not have"
                )
        elif not self.has("fc.weight") and fused is False:
            self.notes.append(
                f"{key} is false and there is no fc: the draft reads the target's state behind its final "
                "norm, as it is"
            )
            return 0
        else:
            if not self.has("fc.weight"):
                self.fail(
                    "lacks fc.weight, which fuses the target's features; only a draft whose config.json says "
                    f"{key}: false has none"
                )
            fc_out, fc_in = self.matrix("fc.weight")
            if fused is False:
                self.fail(
                    f"config.json says {key}: false, but the file holds fc.weight over {fc_in} values of "
                    "features; one of them is wrong"
                )
        if fc_out != hidden:
            self.fail(f"fc.weight makes {fc_out} values, the layers read {hidden}")
        return fc_in

    def _vocabulary(self, version: int, hidden: int) -> tuple[int, int, np.ndarray | None]:
        """(V, Vd, target ids or None) from the map, the embedding, the head and, last, the config."""
        sizes: dict[str, int] = {}
        for name in ("t2d", "d2t"):
            if self.has(name):
                if len(self.store.shape(name)) != 1:
                    self.fail(f"{name} has shape {self.store.shape(name)}; it must be a vector")
                sizes[name] = self.store.shape(name)[0]
        for name in ("embed_tokens.weight", "lm_head.weight"):
            if self.has(name):
                rows, width = self.matrix(name)
                if width != hidden:
                    self.fail(f"{name} is {width} wide, the draft {hidden}")
                sizes[name] = rows
        vocab = sizes.get("t2d") or sizes.get("embed_tokens.weight") or self.whole("vocab_size")
        if vocab is None:
            self.fail("neither its tensors nor config.json say how large the target's vocabulary is")
        if sizes.get("embed_tokens.weight", vocab) != vocab:
            self.fail(f"t2d covers {vocab} tokens but embed_tokens.weight {sizes['embed_tokens.weight']}")
        if self.whole("vocab_size") not in (None, vocab):
            self.notes.append(
                f"config.json says vocab_size {self.whole('vocab_size')}; the tensors say {vocab}"
            )
        stated = self.raw.get("draft_vocab_size")
        draft = sizes.get("lm_head.weight") or sizes.get("d2t") or stated or vocab
        if isinstance(draft, bool) or not isinstance(draft, int) or not 0 < draft <= vocab:
            self.fail(f"the draft's vocabulary is {draft!r}; it must lie in 1..{vocab}")
        if sizes.get("d2t", draft) != draft:
            self.fail(f"d2t has {sizes['d2t']} entries for a head of {draft} tokens")
        if stated not in (None, draft):
            self.notes.append(f"config.json says draft_vocab_size {stated}; the tensors say {draft}")
        self._check_head(version, draft < vocab)
        parts.vocabulary_map(self)
        ids, note = target_ids(self.store, vocab, draft, str(self.folder))
        if note:
            (self.doubt if self.has("d2t") else self.notes.append)(note)
        return vocab, draft, ids

    def _check_head(self, version: int, reduced: bool) -> None:
        """Without a word from the file, a reduced draft without a head is a broken one; so is an EAGLE-3
        draft that names the size of its head's vocabulary."""
        said, found = self.settings.get("head"), self.has("lm_head.weight")
        if said is not None and (said == "own") != found:
            self.fail(
                f"config.json says {KEY}.head: {said!r}, but the file {'holds' if found else 'lacks'} "
                "lm_head.weight"
            )
        if said == "target_rows" and not reduced:
            self.fail(f"config.json says {KEY}.head: 'target_rows', but the draft has the whole vocabulary")
        if version == 3 and not found and said is None and self.raw.get("draft_vocab_size") and not reduced:
            self.fail(
                "lacks lm_head.weight, but config.json gives draft_vocab_size: it has a head of its own"
            )
        if reduced and not found and said != "target_rows":
            self.fail(
                "lacks lm_head.weight; a draft of a part of the vocabulary cannot borrow the target's head "
                f'unless its config.json says so ("{KEY}": {{"head": "target_rows"}})'
            )

    def _third(
        self, hidden: int, fc_in: int, convention: AuxConvention, override: tuple[int, ...] | None
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Settings that EAGLE-3 alone has, and tensors that they switch off."""
        if fc_in:
            aux_norm, each = parts.feature_norm(self, fc_in)
            aux = override if override is not None else self._boundaries(convention)
            num_aux, target_hidden = self._widths(hidden, fc_in, len(aux), each)
        else:
            aux_norm, aux, num_aux, target_hidden = "none", (), 0, hidden
            inner = self.raw.get("eagle_config") or {}
            if ids := self.raw.get(AUX_KEY) or inner.get(AUX_KEY):
                self.notes.append(f"{AUX_KEY} names {ids!r:.80}, which a draft without fc does not read")
            if override:
                raise ConfigError(
                    f"{self.folder} reads the target's state behind its final norm and no other; aux and "
                    "--aux are for drafts that fuse features"
                )
        head_norm, feed_normed, unused = norms.state_norms(self)
        return {
            "target_hidden_size": target_hidden,
            "num_aux": num_aux,
            "aux": aux,
            "aux_norm": aux_norm,
            "norm_before_residual": norms.residual(self),
            "head_norm": head_norm,
            "feed_normed": feed_normed,
        }, unused

    def _boundaries(self, convention: AuxConvention) -> tuple[int, ...]:
        """Boundaries named by the config, () when it names none."""
        inner = self.raw.get("eagle_config")
        places = [self.raw, inner] if isinstance(inner, Mapping) else [self.raw]
        lists = [p[AUX_KEY] for p in places if p.get(AUX_KEY)]
        if "boundaries" in self.settings:
            if lists:
                self.fail(f"config.json names feature layers as {AUX_KEY} and as {KEY}.boundaries")
            convention, lists = "boundary", [self.settings["boundaries"]]
        key = AUX_KEY if lists else "target_layer_ids"
        lists = lists or [self.raw.get(key)] * bool(self.raw.get(key))
        if not lists:
            self.notes.append(
                "config.json names no feature layers; the usual boundaries 2, n/2, n-3 are used"
            )
            return ()
        if any(x != lists[0] for x in lists):
            self.fail(f"config.json gives {AUX_KEY} twice and differently: {lists}")
        ids = lists[0]
        if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            self.fail(f"{key} is {ids!r}; it must be a list of integers")
        if not rising(np.asarray(ids)):
            self.fail(f"{key} {ids} must be increasing: features are joined in the order of the layers")
        why = "as asked for"
        if "boundaries" in self.settings:
            why = "eaglejax names boundaries"
        elif convention == "auto":
            if self.speculators:
                convention, why = "boundary", "speculators counts hidden-state boundaries"
            elif key != AUX_KEY:
                convention, why = "block", f"{key} counts blocks"
            elif ids[0] == 1:
                convention, why = (
                    "block",
                    "a list that starts at 1 counts blocks (the usual default is 1, n/2-1, n-4)",
                )
            else:
                convention, why = "boundary", "it does not start at 1, the usual mark of block numbers"
        aux = tuple(i + 1 if convention == "block" else i for i in ids)
        self.notes.append(
            f"layer ids {ids} are read by the {convention} convention ({why}): boundaries {list(aux)}"
        )
        return aux

    def _widths(self, hidden: int, fc_in: int, named: int, normed: int) -> tuple[int, int]:
        """(features fused, width of each)."""
        stated = self.whole("target_hidden_size", top=True)
        if named or normed:
            count = named or normed
        elif stated:
            count = fc_in // stated
        else:
            count = fc_in // hidden if fc_in % hidden == 0 else 3
        if normed and normed != count:
            self.fail(f"{normed} fc_norm weights for {count} features")
        if count < 1 or fc_in % count or (stated and fc_in != count * stated):
            self.fail(
                f"fc.weight reads {fc_in} values, which is not {count} features of "
                f"{stated or 'one'} width; are the layer ids right?"
            )
        return count, fc_in // count

    def _note_borrowing(self, config: EagleConfig) -> None:
        parts = (("embedding", config.own_embedding), ("head", config.own_head))
        borrowed = [name for name, own in parts if not own]
        if borrowed:
            self.notes.append(f"the target's {' and '.join(borrowed)} will be used; the file has none")
        if config.target_rows:
            self.notes.append(
                f"of the target's head the {config.draft_vocab_size} rows of the draft's tokens are taken"
            )

    def _layout(self, version: int) -> str:
        stored = list(self.store.stored.values())
        wrapped = any(n.startswith(("model.", "draft_model.", "eagle_module.", "module.")) for n in stored)
        if self.own_form:
            return "eaglejax"
        if self.speculators:
            return "speculators"
        if version == 1:
            return "vllm-eagle1" if wrapped and self.has("lm_head.weight") else "safeailab-eagle1"
        if any("midlayer." in n for n in stored):
            return "midlayer (SafeAILab, SGLang, SpecForge, AngelSlim)"
        if wrapped:
            return "nemo"
        return "modelopt" if not self.has("t2d") else "layers.0"
