"""Greedy speculative decoding in torch: prefill and rounds as ``speculate.rounds`` runs them.

``TorchRunner`` takes specs and weights as plain data (NumPy arrays or tensors), so it also runs where there
is no jax. With ``record`` it hands out the intermediate tensors that ``interop.parity.names`` lists.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eaglejax.errors import ConfigError, RequestError
from eaglejax.interop.backends.adapter import DeviceAdapter
from eaglejax.interop.backends.arrays import place, torch_dtype
from eaglejax.interop.backends.torch_import import torch
from eaglejax.interop.models import decoder, eagle, growth
from eaglejax.interop.models.layers import greedy
from eaglejax.interop.models.specs import DecoderSpec, EagleSpec, TreeSpec
from eaglejax.interop.models.verify import keep, verify
from eaglejax.tap import scope, tap, watch

Record = Callable[[str, "torch.Tensor"], None]


@dataclasses.dataclass(frozen=True)
class TorchTarget:
    """A target: its spec and its nested dict of weights (arrays or tensors). ``dtype`` of keys and values:
    that of the weights by default."""

    spec: DecoderSpec
    params: dict[str, Any]
    cache_dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class TorchDraft:
    """An EAGLE draft, its weights and the tree that it grows."""

    spec: EagleSpec
    draft: eagle.Draft
    tree: TreeSpec
    cache_dtype: str | None = None


@dataclasses.dataclass
class State:
    """What a stage changes: both caches, the draft's last state [B, H], and a row's root, tokens emitted, the
    most it may emit and whether it is done, each [B]."""

    cache: decoder.Cache
    draft_cache: decoder.Cache | None
    feature: torch.Tensor | None
    root: torch.Tensor
    emitted: torch.Tensor
    budget: torch.Tensor
    done: torch.Tensor
    stages: dict[str, int] = dataclasses.field(default_factory=lambda: {"prefill": 0, "round": 0})


@dataclasses.dataclass(frozen=True)
class Output:
    """``tokens``: what each row emitted; ``accepted``: drafts kept in each of its rounds; ``rounds``: how
    many rounds ran."""

    tokens: list[list[int]]
    accepted: list[list[int]]
    rounds: int


class TorchRunner:
    """Runs ``target`` with ``draft`` (None: one token a round) on ``adapter``.

    Weights are moved to the adapter's device. Raises ConfigError where the backend cannot run or the draft
    does not fit the target, LimitError where the device does not take a shape or dtype.
    """

    def __init__(
        self,
        target: TorchTarget,
        draft: TorchDraft | None,
        adapter: DeviceAdapter,
        *,
        record: Record | None = None,
    ) -> None:
        adapter.require()
        self._adapter, self._record = adapter, record
        self._spec = target.spec
        device = adapter.device
        self._params = place(target.params, device)
        self._dtype = (
            self._params["norm"].dtype if target.cache_dtype is None else torch_dtype(target.cache_dtype)
        )
        self._draft = draft
        self._tree = TreeSpec("static", 0, 0, 1, (0,), (0,)) if draft is None else draft.tree
        if draft is not None:
            self._check(draft)
            self._weights = draft.draft.on(device)
            self._draft_dtype = (
                self._weights.dtype if draft.cache_dtype is None else torch_dtype(draft.cache_dtype)
            )

    def _check(self, draft: TorchDraft) -> None:
        spec, target = draft.spec, self._spec
        if spec.vocab_size != target.vocab_size or spec.target_hidden_size != target.hidden_size:
            raise ConfigError(
                f"the draft is for {spec.vocab_size} tokens and features of {spec.target_hidden_size}; the "
                f"target has {target.vocab_size} and {target.hidden_size}"
            )

    @property
    def adapter(self) -> DeviceAdapter:
        """Where everything runs."""
        return self._adapter

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        eos_ids: Sequence[int] = (),
        context: int | None = None,
        prefill_width: int | None = None,
    ) -> Output:
        """Decode ``prompts`` (token ids) greedily.

        ``context``: longest row, prompt and output together; ``prefill_width``: most prompt tokens a forward
        (None: the longest prompt's). Raises RequestError for an empty prompt or one that is too long.
        """
        longest = max((len(p) for p in prompts), default=0)
        for i, prompt in enumerate(prompts):
            if not prompt or not all(0 <= t < self._spec.vocab_size for t in prompt):
                raise RequestError(f"prompt {i} is empty or holds ids outside 0..{self._spec.vocab_size - 1}")
            if context is not None and len(prompt) > context:
                raise RequestError(f"prompt {i} has {len(prompt)} tokens; the context is {context}")
        room = [max_new_tokens if context is None else context - len(p) for p in prompts]
        budget = [min(max_new_tokens, r) for r in room]
        width = min(prefill_width or longest, longest)
        state = self.start(budget, longest + max(budget) + width)
        tokens: list[list[int]] = [[] for _ in prompts]
        accepted: list[list[int]] = [[] for _ in prompts]
        for begin in range(0, longest, width):
            parts = [list(p[begin : begin + width]) for p in prompts]
            following = [list(p[begin + 1 : begin + width + 1]) for p in prompts]
            last = [begin < len(p) <= begin + width for p in prompts]
            out, count, _ = self.prefill(state, parts, following, last, eos_ids)
            for row, kept in enumerate(count.tolist()):
                tokens[row] += out[row, :kept].tolist()
        rounds = 0
        while not bool(state.done.all()):
            was_done = state.done.tolist()
            out, count, drafts = self.round(state, eos_ids)
            for row, kept in enumerate(count.tolist()):
                tokens[row] += out[row, :kept].tolist()
                if not was_done[row]:
                    accepted[row].append(min(int(drafts[row]), kept))
            rounds += 1
        return Output(tokens, accepted, rounds)

    def start(self, budget: Sequence[int], capacity: int) -> State:
        """An empty state of rows that may emit ``budget`` tokens each; ``capacity``: most tokens that a row
        comes to hold, drafts aside."""
        b, device, spec = len(budget), self._adapter.device, self._spec
        slots = capacity + self._tree.nodes
        zeros = torch.zeros(b, dtype=torch.int32, device=device)
        draft_cache = feature = None
        if self._draft is not None:
            own = self._draft.spec
            draft_cache = decoder.init_cache(
                own.num_layers,
                b,
                slots + self._tree.scratch,
                own.num_kv_heads,
                own.head_dim,
                self._draft_dtype,
                device,
            )
            feature = torch.zeros(b, own.hidden_size, dtype=self._weights.dtype, device=device)
        left = torch.tensor(list(budget), dtype=torch.int32, device=device)
        cache = decoder.init_cache(
            spec.num_layers, b, slots, spec.num_kv_heads, spec.head_dim, self._dtype, device
        )
        return State(cache, draft_cache, feature, zeros, zeros.clone(), left, left <= 0)

    def prefill(
        self,
        state: State,
        chunks: Sequence[Sequence[int]],
        following: Sequence[Sequence[int]],
        last: Sequence[bool],
        eos_ids: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take in the next prompt tokens of each row; a row whose ``last`` is set emits its first token.

        ``following``: for each of a chunk's tokens the next prompt token; the last chunk's is one short.
        Returns (tokens [B, 1], how many are emitted [B], zeros [B]).
        """
        with self._stage(state, "prefill"):
            device, b = self._adapter.device, len(chunks)
            width = max(1, *(len(c) for c in chunks))
            tokens = _padded(chunks, width, device)
            count = torch.tensor([len(c) for c in chunks], dtype=torch.int32, device=device)
            ends = torch.tensor(list(last), device=device)
            steps = torch.arange(width, dtype=torch.int32, device=device)
            end = (count - 1).clamp_min(0).long()
            with scope("target"):
                out = decoder.forward(
                    self._adapter,
                    self._spec,
                    self._params,
                    tokens,
                    state.cache.lengths[:, None] + steps,
                    state.cache,
                    decoder.causal(b, count, width),
                    aux=self._aux,
                    prompt=count,
                )
                hidden = out.hidden.gather(1, end[:, None, None].expand(-1, 1, out.hidden.shape[2]))
                logits = decoder.unembed(self._adapter, self._spec, self._params, hidden)
            first = greedy(logits[:, 0])
            kept, ended = _kept(state, first[:, None], ends.to(torch.int32), eos_ids)
            finite = logits.amax(-1)[:, 0].isfinite() | (kept == 0)
            kept = torch.where(finite, kept, 0)
            _tap_all("verify", {"tokens": first[:, None], "count": kept})
            next_tokens = _padded(following, width, device)
            next_tokens = torch.where((steps == end[:, None]) & ends[:, None], first[:, None], next_tokens)
            state.cache.lengths = state.cache.lengths + count
            self._observe(state, out.aux, out.hidden, next_tokens, count, prompt=True)
            state.root = torch.where(kept > 0, first, state.root)
            state.emitted = state.emitted + kept
            state.done = torch.where(ends, ended | ~finite, state.done)
            return first[:, None], kept, torch.zeros_like(kept)

    def round(
        self, state: State, eos_ids: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Propose, verify and commit once: (tokens [B, D+1], how many are emitted [B], drafts kept [B])."""
        with self._stage(state, "round"):
            lengths = state.cache.lengths
            tree = self._propose(state)
            left = torch.where(state.done, 0, state.budget - state.emitted)
            is_root = torch.arange(self._tree.nodes, device=lengths.device) == 0
            tree.valid = tree.valid & (tree.depth <= left[:, None]) | is_root
            if self._draft is not None:
                _tap_all("draft/tree", {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)})
            levels = self._levels
            seen_by = growth.ancestors(tree.parent, tree.valid, levels)
            with scope("target"):
                out = decoder.forward(
                    self._adapter,
                    self._spec,
                    self._params,
                    tree.tokens,
                    lengths[:, None] + tree.depth,
                    state.cache,
                    seen_by,
                    aux=self._aux,
                )
                logits = decoder.unembed(self._adapter, self._spec, self._params, out.hidden)
            path, accepted, following = verify(tree, greedy(logits), levels)
            on_path = tree.tokens.gather(1, path)
            steps = torch.arange(path.shape[1], device=path.device)
            tokens = torch.where(steps < accepted[:, None], on_path.roll(-1, 1), following[:, None])
            kept, ended = _kept(state, tokens, accepted + 1, eos_ids)
            sound = logits.amax(-1).isfinite().gather(1, path)
            computed = sound.to(torch.int32).cumprod(1).sum(1).to(torch.int32)
            finite = computed >= kept
            kept = torch.minimum(kept, computed)
            _tap_all(
                "verify",
                {"path": path.to(torch.int32), "accepted": accepted, "tokens": tokens, "count": kept},
            )
            aux = None if out.aux is None else _at(out.aux, path)
            decoder.commit(state.cache, path, kept)
            self._observe(state, aux, _at(out.hidden, path), tokens, kept)
            newest = tokens.gather(1, (kept - 1).clamp_min(0).long()[:, None])[:, 0]
            state.root = torch.where(kept > 0, newest, state.root)
            state.emitted = state.emitted + kept
            state.done = ended | ~finite
            return tokens, kept, accepted

    @contextlib.contextmanager
    def _stage(self, state: State, stage: str) -> Iterator[None]:
        """The body is the next stage of its kind; whoever records sees what it taps."""
        watched = contextlib.nullcontext() if self._record is None else watch(self._record)
        with watched, scope(f"{stage}/{state.stages[stage]}"):
            yield
        state.stages[stage] += 1

    @property
    def _aux(self) -> tuple[int, ...]:
        return self._draft.spec.taps if self._draft is not None else ()

    @property
    def _levels(self) -> int:
        """Most drafts that a round can accept (D)."""
        return self._tree.levels if self._draft is not None else 0

    def _propose(self, state: State) -> growth.Tree:
        if self._draft is None:
            root = state.root[:, None]
            zero = torch.zeros_like(root)
            return growth.Tree(root, zero, zero, zero == 0, zero.float())
        assert state.draft_cache is not None
        assert state.feature is not None
        grower = growth.Grower(
            self._adapter,
            self._draft.spec,
            self._weights,
            self._tree,
            state.draft_cache,
        )
        with scope("draft"):
            return grower.grow(state.root, state.feature)

    def _observe(
        self,
        state: State,
        aux: torch.Tensor | None,
        hidden: torch.Tensor,
        following: torch.Tensor,
        count: torch.Tensor,
        *,
        prompt: bool = False,
    ) -> None:
        """Append the pairs (true feature of a committed token, the token after it) to the draft's cache."""
        if self._draft is None:
            return
        spec, cache = self._draft.spec, state.draft_cache
        assert cache is not None
        assert state.feature is not None
        features = hidden[:, :, None] if aux is None else aux
        steps = torch.arange(features.shape[1], dtype=torch.int32, device=features.device)
        real = steps < count[:, None]
        feature = eagle.fuse(self._adapter, spec, self._weights, features)
        feature = feature.masked_fill(~real[:, :, None], 0)
        positions = cache.lengths[:, None] + steps
        visible = (steps[None, :] <= steps[:, None]).expand(len(count), -1, -1)
        with scope("draft/observe"):
            out = eagle.step(
                self._adapter,
                spec,
                self._weights,
                feature,
                following,
                positions,
                cache,
                visible,
                positions,
                prompt=count if prompt else None,
            )
        last = (count - 1).clamp_min(0).long()
        newest = out.gather(1, last[:, None, None].expand(-1, 1, out.shape[2]))[:, 0]
        state.feature = torch.where(count[:, None] > 0, newest, state.feature)
        cache.lengths = cache.lengths + count


def _tap_all(where: str, found: dict[str, torch.Tensor]) -> None:
    with scope(where):
        for name, tensor in found.items():
            tap(name, tensor)


def _padded(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int32, device=device)


def _at(x: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """``x`` [B, N, ...] at the nodes ``path`` [B, D+1]."""
    return torch.stack([row[nodes] for row, nodes in zip(x, path, strict=True)])


def _kept(
    state: State, tokens: torch.Tensor, count: torch.Tensor, eos_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return keep(tokens, count, left=state.budget - state.emitted, done=state.done, eos_ids=eos_ids)
