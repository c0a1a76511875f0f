"""Exercises of lesson 05: Algorithm 1's inner update, and the capstone, all of attention."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake
from .common import SCALE, cases, normal, qkv, weights

Bc = 8


def _scores(rng, N, N_k, special=True):
    S, V = normal(rng, N, N_k, size=2.5), normal(rng, N_k, 4, mean=1.0)
    if special:
        S[1::5] += np.arange(N_k)
        S[2::5] -= 400
        S[3::5, : Bc + 1] = -np.inf
        S[4::5] = -np.inf
    return S, V


def _updated(S, V, *, old_O=True, old_l=True, new=True, l_in_O=True, divide=True):
    """Algorithm 1, lines 10 to 13, tile after tile, with a slip."""
    O, l, m = np.zeros((len(S), V.shape[1]), S.dtype), np.zeros(len(S), S.dtype), np.full(len(S), -np.inf, S.dtype)
    for j in range(0, S.shape[1], Bc):
        part = S[:, j : j + Bc]
        m_tile = part.max(axis=1)
        m_new = np.maximum(m, m_tile)
        finite, finite_tile = (np.where(np.isneginf(x), 0, x) for x in (m_new, m_tile))
        P = np.exp(part - finite_tile[:, None])
        w_old, w_new = np.exp(m - finite), np.exp(m_tile - finite) if new else np.ones_like(m)
        l_new = (w_old if old_l else 1) * l + w_new * P.sum(axis=1)
        before = (w_old if old_O else 1) * (l if l_in_O else 1)
        O = before[:, None] * O + w_new[:, None] * (P @ V[j : j + Bc])
        if divide:
            O = O / np.where(l_new == 0, 1, l_new)[:, None]
        l, m = l_new, m_new
    return O, l, m


EXERCISES = (
    Exercise(
        name="05_rescale",
        answer="update",
        outputs=("O", "l", "m"),
        inputs=cases(10, _scores, {"N": 37, "N_k": 21}, {"N": 1, "N_k": 1, "_special": False}, {"N": 32, "N_k": 16}),
        sizes=lambda S, V: {"N": S.shape[0], "N_k": S.shape[1], "Tc": -(-S.shape[1] // Bc)},
        bill=(
            Bound("S_ij", "loads", "N*N_k", "each score once, into S_i", "S_ij is loaded again: use S_i, in registers"),
            Bound(
                "V_j",
                "loads",
                "N*N_k*d",
                "each thread loads the tile once",
                "V_j is loaded twice: one loop over the keys for each column of O",
            ),
            Bound(
                "O",
                "loads",
                "Tc*N*d",
                "line 8, once per tile of keys",
                "O is loaded for each key: add up in a variable, one column at a time",
            ),
            Bound(
                "O",
                "stores",
                "Tc*N*d",
                "line 12, once per tile of keys",
                "O is stored for each key: add up in a variable, one column at a time",
            ),
            *(
                Bound(
                    x,
                    kind,
                    "Tc*N",
                    "once per tile of keys",
                    f"{x}[i] is accessed more than once: give it a name, a register",
                )
                for x in "lm"
                for kind in ("loads", "stores")
            ),
        ),
        hints=(
            "Line by line: m_tile is the maximum of S_i, P = exp(S_i - m_tile) can overwrite S_i, l_tile is its sum. "
            "Then m_new, then l_new, then O column by column.",
            "Two factors: weight(m_i, m_new) brings what was to the new scale, weight(m_tile, m_new) what is new. O "
            "is divided by the old l, so l_i times the first factor is what it is multiplied by.",
            "l_old = weight(m_i, m_new) * l[i]; new = weight(m_tile, m_new); l_new = l_old + new * l_tile; for each "
            "t the sum acc of S_i[c] * V_j[c, t], and O[i, t] = (l_old * O[i, t] + new * acc) / l_new, or 0 if l_new "
            "is 0.",
        ),
        mistakes=(
            Mistake(
                "The old O is not rescaled when m grows: multiply it by exp(m_i - m_new), too.",
                lambda S, V: _updated(S, V, old_O=False),
            ),
            Mistake(
                "The old l is not rescaled when m grows: multiply it by exp(m_i - m_new).",
                lambda S, V: _updated(S, V, old_l=False),
            ),
            Mistake(
                "The old l and O are not rescaled when m grows: multiply both by exp(m_i - m_new).",
                lambda S, V: _updated(S, V, old_l=False, old_O=False),
            ),
            Mistake(
                "What the tile gives is not brought to the new scale: multiply it by exp(m_tile - m_new).",
                lambda S, V: _updated(S, V, new=False),
            ),
            Mistake(
                "The old O is taken for l·O. It is divided by l already: multiply it by the old l first.",
                lambda S, V: _updated(S, V, l_in_O=False),
            ),
            Mistake("O is not divided by l_new.", lambda S, V: _updated(S, V, divide=False)),
            Mistake(
                "Where all scores so far are -∞, l_new is 0, and 0/0 is nan: O stays 0 there.",
                lambda S, V: (
                    np.where(np.isneginf(S[:, :Bc]).all(axis=1)[:, None], np.nan, _updated(S, V)[0]),
                    *_updated(S, V)[1:],
                ),
            ),
        ),
        faults={
            "UninitializedRead": "S_i holds the scores of this tile alone, `keys` of them; the last tile has fewer "
            "than Bc.",
            "OutOfBounds": "the last tile has fewer than Bc keys: loop over range(keys).",
            "unwritten": "O, l and m all go back to HBM: lines 12 and 13.",
            "wrong": "take two tiles by hand, with the table of Algorithm 1, and compare.",
        },
    ),
    Exercise(
        name="05_attention",
        answer="attention",
        start=("def attention(Q, K, V, scale):", "    return None"),
        outputs=("O",),
        inputs=cases(
            11,
            lambda rng, N, N_k, d: (*qkv(rng, N, N_k, d), SCALE),
            {"N": 70, "N_k": 97, "d": 16},
            {"N": 1, "N_k": 1, "d": 1},
            {"N": 64, "N_k": 32, "d": 32},
            {"N": 33, "N_k": 5, "d": 7},
            {"N": 3, "N_k": 100, "d": 16},
        ),
        sizes=lambda Q, K, V, scale: {"N": len(Q), "N_k": len(K), "d": Q.shape[1], "Br": 32},
        bill=(
            Bound(
                "total",
                "elements",
                "2*N*d + 2*N_k*d*tiles(N, Br) + N",
                "flash2's bill: Q and O once, K and V once per tile of Br queries",
                "a tile has fewer queries than Br, or does not share K and V; or something that grows with N·N_k is "
                "in HBM",
            ),
        ),
        hints=(
            "Begin with 08_skip's or lesson 05's picture: a block of threads has a tile of queries, one per thread, "
            "and walks through all keys. What lives in registers, what in shared memory, what in HBM?",
            "Registers: Q_i and O_i (d numbers each), m and l. Shared: K_j, V_j and a tile of scores, one column per "
            "thread. The threads load K_j and V_j together, then a barrier, then each does what 04_online does, for "
            "a tile of keys; then a barrier again.",
            "The kernel `flash2` in lesson 05 without `allowed`, `visited`, `keep`, `mask`, heads and L is nearly "
            "the answer. At the edges: threads past the last query load and store nothing of Q and O, but come to "
            "the barriers; the last tile of keys has min(Bc, N_k - j).",
        ),
        mistakes=(
            Mistake("The scores are not multiplied by scale.", lambda Q, K, V, scale: weights(Q @ K.T) @ V),
            Mistake(
                "The scale is 1/√d here, whatever was asked for.",
                lambda Q, K, V, scale: weights(Q @ K.T / np.float32(Q.shape[1] ** 0.5)) @ V,
            ),
            Mistake(
                "O is not divided by l.",
                lambda Q, K, V, scale: weights(scale * (Q @ K.T), l=np.ones((len(Q), 1), np.float32)) @ V,
            ),
        ),
        faults={
            "RaceDetected": "a barrier is missing: after the loads of K_j and V_j, or at the end of the step.",
            "BarrierDivergence": "threads past the last query must come to the barriers, too: guard loads and "
            "stores, not the loop over the keys.",
            "UninitializedRead": "the last tile of keys has fewer than the others: rows of K_j past it were not "
            "loaded. Or a tile of scores was used before it was written.",
            "OutOfBounds": "N and N_k need not be multiples of your tiles: guard the loads and the stores.",
            "unwritten": "the grid has too few blocks, or the guard keeps too many threads out: ⌈N/Br⌉ blocks are "
            "needed.",
            "wrong": "if it is right for few keys and wrong for many, look at what happens from one tile of keys to "
            "the next: l and O are rescaled when m grows.",
        },
    ),
)
