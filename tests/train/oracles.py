"""NumPy transcriptions, in float64, of what the two PyTorch trainers of EAGLE-3 drafts optimise.

Written from the description of their losses: which rows are masked, what is renormalised, what is divided by.
"""

import numpy as np


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def left(x, by):
    """Shift along axis 1, zeros from the right."""
    return np.concatenate([x[:, by:], np.zeros_like(x[:, :by])], axis=1) if by else x


def specforge(target_logits, draft_logits, loss_mask, member, decay=0.8):
    """target_logits [B, S, V] (row t: the distribution of token t + 1); draft_logits: one [B, S, Vd] a step;
    loss_mask [B, S]; member [V] bool. (loss, accuracy of each step)."""
    ids = np.flatnonzero(member)
    z = left(target_logits.astype(np.float64), 1)
    total, accuracy = 0.0, []
    for k, q in enumerate(draft_logits):
        zk, mask = left(z, k), left(loss_mask.astype(np.float64), k)
        token = zk.argmax(-1)
        position_mask = mask * member[token]
        p = np.exp(log_softmax(zk[..., ids]))
        rows = -(p * log_softmax(q.astype(np.float64))).sum(-1) * position_mask
        total += decay**k * rows.mean()
        right = (ids[q.argmax(-1)] == token) * mask
        accuracy.append(right.sum() / mask.sum())
    return total, accuracy


def specforge_lk(kind, target_logits, draft_logits, loss_mask, member, kl_scale=1.0, kl_decay=1.0):
    """The acceptance losses of one step, over the rows of loss_mask."""
    ids = np.flatnonzero(member)
    z = left(target_logits.astype(np.float64), 1)
    full = np.exp(log_softmax(z))[..., ids]
    log_p, log_q = log_softmax(z[..., ids]), log_softmax(draft_logits.astype(np.float64))
    mask = loss_mask.astype(bool)
    alpha = np.minimum(full, np.exp(log_q)).sum(-1)[mask].mean()
    if kind == "alpha":
        return -np.log(alpha)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)[mask].mean()
    weight = kl_scale * np.exp(-kl_decay * alpha)
    return weight * kl + (1 - weight) * (1 - alpha)


def speculators(target_logits, draft_logits, loss_mask, member, decay=1.0, kind="kl"):
    """The same arguments; each step is divided by its own mask sum, rows that run off the end are dropped."""
    ids = np.flatnonzero(member)
    y, mask = target_logits.astype(np.float64)[:, 1:], loss_mask.astype(np.float64)[:, 1:]
    total = 0.0
    for k, q in enumerate(draft_logits):
        length = y.shape[1] - k
        log_p = log_softmax(y[:, k:][..., ids])
        log_q = log_softmax(q.astype(np.float64)[:, :length])
        p, m = np.exp(log_p), mask[:, k:]
        if kind == "kl":
            rows = (p * (log_p - log_q)).sum(-1)
        elif kind == "ce":
            rows = -(p * log_q).sum(-1)
        else:
            rows = 0.5 * np.abs(p - np.exp(log_q)).sum(-1)
        total += decay**k * (rows * m).sum() / (m.sum() + 1e-5)
    return total


def eagle1(true_features, features, head, loss_mask, token_weight=0.1):
    """Row t predicts the feature of t + 1: SmoothL1 averaged over the width plus a small cross entropy."""
    wanted = left(true_features.astype(np.float64), 1)
    d = np.abs(features.astype(np.float64) - wanted)
    smooth = np.where(d < 1, 0.5 * d * d, d - 0.5).mean(-1)
    p = np.exp(log_softmax(wanted @ head))
    ce = -(p * log_softmax(features.astype(np.float64) @ head)).sum(-1)
    rows = loss_mask.sum()
    return (smooth * loss_mask).sum() / rows + token_weight * (ce * loss_mask).sum() / rows


def dpace(draft_logits, labels, masks, alpha):
    """(loss, weights [K, B, T]): draft_logits [K, B, T, V], labels, masks [K, B, T]. Row by row: how likely
    the draft's own smoothed confidence carries it to a guess, summed over the guesses from there on."""
    steps, batch, length = labels.shape
    weights, entropy = np.zeros(labels.shape), np.zeros(labels.shape)
    for b in range(batch):
        for t in range(length):
            kept, reached = 1.0, []
            for k in range(steps):
                entropy[k, b, t] = -log_softmax(draft_logits[k, b, t].astype(np.float64))[labels[k, b, t]]
                if masks[k, b, t]:
                    kept *= (1 - alpha) * np.exp(-entropy[k, b, t]) + alpha
                reached.append(kept if masks[k, b, t] else 0.0)
            for k in range(steps):
                weights[k, b, t] = sum(reached[k:]) * masks[k, b, t]
    counts = np.maximum(masks.sum((1, 2)), 1)
    return ((weights * entropy).sum((1, 2)) / counts).sum(), weights
