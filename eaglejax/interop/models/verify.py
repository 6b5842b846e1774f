"""Greedy verification in torch, and where an answer ends, by the rules of ``speculate.verify`` and
``speculate.rounds``."""

from __future__ import annotations

from collections.abc import Sequence

from eaglejax.interop.backends.torch_import import torch
from eaglejax.interop.models.growth import Tree


def verify(tree: Tree, best: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The longest path of the target's own tokens: (nodes [B, D+1] int64, drafts kept [B], next token)."""
    numbers = torch.arange(tree.tokens.shape[1], device=best.device)
    matches = tree.valid & (numbers > 0) & (tree.tokens == best.gather(1, tree.parent.long()))
    node = torch.zeros(len(best), dtype=torch.int64, device=best.device)
    path, accepted = [node], torch.zeros_like(best[:, 0])
    for _ in range(levels):
        open_ = matches & (tree.parent == node[:, None])
        found = open_.any(1)
        lowest = torch.where(open_, numbers, len(numbers)).amin(1)
        node = torch.where(found, lowest, node)
        accepted = accepted + found.to(accepted.dtype)
        path.append(node)
    return torch.stack(path, 1), accepted, best.gather(1, node[:, None])[:, 0]


def keep(
    tokens: torch.Tensor,
    count: torch.Tensor,
    *,
    left: torch.Tensor,
    done: torch.Tensor,
    eos_ids: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the first ``count`` [B] of ``tokens`` [B, M] at an end-of-text id and where ``left`` [B] are out:
    (tokens kept [B], row ended [B]); a row that is ``done`` [B] keeps none."""
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    eos = torch.tensor(list(eos_ids), dtype=tokens.dtype, device=tokens.device)
    ends = (tokens[:, :, None] == eos).any(-1) & (steps < count[:, None])
    first = torch.where(ends, steps, tokens.shape[1] - 1).amin(1) + 1
    kept = torch.minimum(torch.minimum(count, first.to(torch.int32)), left)
    kept = torch.where(done, 0, kept)
    return kept, done | (ends & (steps < kept[:, None])).any(1) | (kept >= left)
