"""Exercises of lesson 05: Algorithm 1's inner update, and the capstone, all of attention."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake, Share, constants
from .common import (
    LOWEST,
    MAXIMUM_WITHOUT_SCALE,
    NO_MAXIMUM,
    SENTINEL,
    attention_inputs,
    cases,
    finite_start,
    maximum_without_scale,
    no_maximum,
    no_rescale,
    normal,
    weights,
)

(Bc,) = constants("05_rescale", "Bc")  # 05_flash2 has the same


def _scores(rng, N, N_k, special=True):
    S, V = normal(rng, N, N_k, size=2.5), normal(rng, N_k, 4, mean=1.0)
    if special:
        S[1::5] += np.arange(N_k)
        S[2::5] -= 400
        S[3::5, : Bc + 1] = -np.inf
        S[4::5] = -np.inf
        S[5::10] = LOWEST
    return S, V


def _updated(S, V, *, old_O=True, old_l=True, new_O=True, new_l=True, l_in_O=True, divide=True, start=-np.inf,
             times_l=True, add_l=True, add_O=True, stored="Olm"):  # fmt: skip
    """Algorithm 1, lines 10 to 13, tile after tile, with a slip. stored: what goes back to HBM."""
    O, l, m = np.zeros((len(S), V.shape[1]), S.dtype), np.zeros(len(S), S.dtype), np.full(len(S), -np.inf, S.dtype)
    for j in range(0, S.shape[1], Bc):
        part = S[:, j : j + Bc]
        m_tile = part.max(axis=1, initial=start)
        m_new = np.maximum(m, m_tile)
        finite, finite_tile = (np.where(np.isneginf(x), 0, x) for x in (m_new, m_tile))
        P = np.exp(part - finite_tile[:, None])
        w_old, w_new = np.exp(m - finite), np.exp(m_tile - finite)
        l_before = l if times_l else np.ones_like(l)
        l_new = (w_old if old_l else 1) * l_before * add_l + (w_new if new_l else 1) * P.sum(axis=1)
        before = (w_old if old_O else 1) * (l_before if l_in_O else 1) * add_O
        scale = w_new if new_O else np.ones_like(w_new)
        O_old, O = O, before[:, None] * O + scale[:, None] * (P @ V[j : j + Bc])
        if divide:
            O = O / np.where(l_new == 0, 1, l_new)[:, None]
        O, l, m = (new if x in stored else old for x, old, new in (("O", O_old, O), ("l", l, l_new), ("m", m, m_new)))
    return O, l, m


def _stale(Q, K, V, scale):
    """Attention in which the last tile also counts what the one before has left behind it in shared memory."""
    N_k = len(K)
    P, times = weights(scale * (Q @ K.T)), np.ones(N_k, np.float32)
    if N_k > Bc and N_k % Bc:
        times[N_k - Bc : N_k - N_k % Bc] = 2
    return (P * times) @ V / (P * times).sum(axis=1, keepdims=True)


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
        share=(Share("HBM", "Bc*d + Bc + 2*d + 4", "its scores, V_j and its own row of O, l and m"),),
        hints=(
            "Line by line: m_tile is the maximum of S_i, P = exp(S_i - m_tile) can overwrite S_i, l_tile is its sum. "
            "Then m_new, then l_new, then O column by column. Loops over S_i are over range(Bc), a constant, so that "
            "S_i stays in registers.",
            "Two factors: weight(m_i, m_new) brings what was to the new scale, weight(m_tile, m_new) what is new. O "
            "is divided by the old l, so l_i times the first factor is what it is multiplied by.",
            "l_old = weight(m_i, m_new) * l[i]; new = weight(m_tile, m_new); l_new = l_old + new * l_tile; for each "
            "t the sum acc of S_i[c] * V_j[c, t] over range(Bc), where c < keys, and O[i, t] = (l_old * O[i, t] + new "
            "* acc) / l_new, or 0 if l_new is 0.",
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
                lambda S, V: _updated(S, V, new_O=False, new_l=False),
            ),
            Mistake(
                "What the tile adds to O is not brought to the new scale: multiply it by exp(m_tile - m_new), too.",
                lambda S, V: _updated(S, V, new_O=False),
            ),
            Mistake(
                "What the tile adds to l is not brought to the new scale: multiply it by exp(m_tile - m_new), too.",
                lambda S, V: _updated(S, V, new_l=False),
            ),
            Mistake(
                "The old O is taken for l·O. It is divided by l already: multiply it by the old l first.",
                lambda S, V: _updated(S, V, l_in_O=False),
            ),
            Mistake(
                "m_tile begins at a finite number, not at -∞: where all scores are lower, or -∞, m must be so, too.",
                lambda S, V: _updated(S, V, start=SENTINEL),
            ),
            *(
                Mistake(
                    f"{what} stored: the next tile finds what was there before the first, as if it were the first.",
                    lambda S, V, stored=stored: _updated(S, V, stored=stored),
                )
                for what, stored in (("m is not", "Ol"), ("l is not", "Om"), ("Neither l nor m is", "O"))
            ),
            Mistake(
                "O is not stored: it stays 0, as it was before the first tile.",
                lambda S, V: _updated(S, V, stored="lm"),
            ),
            Mistake(
                "The old l is left out: what was weighs weight(m_i, m_new)·l, in l_new and in O.",
                lambda S, V: _updated(S, V, times_l=False),
            ),
            Mistake(
                "l_new is the new tile's alone: the old l, times weight(m_i, m_new), is to be added.",
                lambda S, V: _updated(S, V, add_l=False),
            ),
            Mistake(
                "The old O is left out: the old l times the old O, rescaled, is to be added.",
                lambda S, V: _updated(S, V, add_O=False),
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
            "OutOfBounds": "the last tile has fewer than Bc keys: in range(Bc), use row c of V_j only if c < keys.",
            "unwritten": "O, l and m all go back to HBM: lines 12 and 13.",
            "wrong": "take two tiles by hand, with the table of Algorithm 1, and compare.",
        },
    ),
    Exercise(
        name="05_flash2",
        answer="forward",
        outputs=("O",),
        grid=("Br", None),
        inputs=cases(
            20,
            lambda rng, N, N_k, **how: attention_inputs(rng, N, N_k, 16, **how),
            {"N": 70, "N_k": 45},
            {"N": 1, "N_k": 1},
            {"N": 64, "N_k": 16},
            {"N": 5, "N_k": 21, "_high": True},
            {"N": 3, "N_k": 5, "_low": True},
        ),
        sizes=lambda Q, K, V, scale: {"N": len(Q), "N_k": len(K)},
        bill=(
            Bound("Q", "loads", "N*d", "each row once, into Q_i", "Q is loaded again in the hole: use Q_i"),
            *(
                Bound(
                    x,
                    "loads",
                    "N_k*d*tiles(N, Br)",
                    "once per tile of queries",
                    f"{x} is loaded again in the hole: use {x}_j, in shared memory",
                )
                for x in "KV"
            ),
            Bound("O", "stores", "N*d", "each element once, at the end", "O is stored in the hole, too: use O_i"),
            Bound("O", "loads", "0", "O is a result", "O is read in the hole: use O_i, in registers"),
        ),
        share=(
            Share(
                "HBM",
                "2*d + 2*tiles(N_k*d, Br)",
                "its rows of Q and O, and 1/Br of each tile of K and V",
            ),
            Share(
                "shared memory",
                "4*N_k*(d + 2) + 4*tiles(N_k*d, Br)",
                "twice what it takes: its part of the loads, K_j and V_j, and its column of S_ij",
            ),
        ),
        hints=(
            "Three loops over the tile's keys or over d, one after another: the scores and their maximum; the "
            "rescaling of what earlier tiles gave; the sums with the new weights.",
            "m_new begins at m_i, and each score of the tile may raise it. Then old = exp(m_i - m_new) is what l_i and "
            "each O_i[t] are multiplied by, once per tile. A key's weight is exp(S_ij[c, r] - m_new).",
            "First loop: s grows by Q_i[t] * K_j[c, t], then S_ij[c, r] = s * scale and m_new = max(m_new, S_ij[c, "
            "r]). Then l_i *= old and O_i[t] *= old. Last loop: p = math.exp(S_ij[c, r] - m_new), l_i += p, O_i[t] += "
            "p * V_j[c, t]. At the end m_i = m_new.",
        ),
        mistakes=(
            finite_start("m_new", guarded=False),
            Mistake(MAXIMUM_WITHOUT_SCALE, maximum_without_scale),
            Mistake(NO_MAXIMUM, lambda Q, K, V, scale: no_maximum(scale * (Q @ K.T), V)),
            Mistake(
                "O_i is not rescaled when m grows: multiply it by exp(m_i - m_new) before the new keys are added.",
                lambda Q, K, V, scale: no_rescale(scale * (Q @ K.T), V, Bc, O=False),
            ),
            Mistake(
                "l_i is not rescaled when m grows: multiply it by exp(m_i - m_new) before the new keys are added.",
                lambda Q, K, V, scale: no_rescale(scale * (Q @ K.T), V, Bc, l=False),
            ),
            Mistake(
                "Neither l_i nor O_i is rescaled when m grows: multiply both by exp(m_i - m_new).",
                lambda Q, K, V, scale: no_rescale(scale * (Q @ K.T), V, Bc, l=False, O=False),
            ),
            Mistake("The scores are not multiplied by scale.", lambda Q, K, V, scale: weights(Q @ K.T) @ V),
            Mistake(
                "Keys of the tile before count twice: the last tile has `keys` keys, range(keys), and not Bc.",
                _stale,
            ),
            Mistake(
                "V is added up without weights: a key counts with p = exp(S_ij[c, r] - m_new).",
                lambda Q, K, V, scale: np.broadcast_to(V.mean(axis=0), Q.shape),
            ),
        ),
        faults={
            "RaceDetected": "column r of S_ij belongs to thread r: S_ij[c, r].",
            "UninitializedRead": "the last tile has fewer than Bc keys: loop over range(keys).",
            "OutOfBounds": "rows of K_j, V_j and S_ij are keys of the tile, c; a thread's own number is r.",
            "BarrierDivergence": "the barriers around the hole are all that is needed.",
            "wrong": "if it is right for at most Bc keys and wrong for more, look at what happens from one tile to the "
            "next: l_i and O_i are rescaled, and m_i becomes m_new.",
        },
    ),
    Exercise(
        name="05_attention",
        answer="attention",
        start=("def attention(Q, K, V, scale):", "    return None"),
        outputs=("O",),
        inputs=cases(
            11,
            attention_inputs,
            {"N": 70, "N_k": 97, "d": 16},
            {"N": 1, "N_k": 1, "d": 1},
            {"N": 64, "N_k": 32, "d": 32},
            {"N": 33, "N_k": 21, "d": 7},
            {"N": 3, "N_k": 1000, "d": 16},
            {"N": 5, "N_k": 21, "d": 16, "_high": True},
            {"N": 3, "N_k": 5, "d": 16, "_low": True},
        ),
        counted_on=3,
        sizes=lambda Q, K, V, scale: {"N": len(Q), "N_k": len(K), "d": Q.shape[1], "Br": 32},
        bill=(
            Bound(
                "total",
                "elements",
                "2*N*d + 2*N_k*d*tiles(N, Br)",
                "flash2's bill without L: Q and O once, K and V once per tile of Br queries",
                "a tile has fewer queries than Br, or does not share K and V; or something that grows with N·N_k is "
                "in HBM",
            ),
        ),
        share=(
            Share(
                "HBM", "8*d + 8*tiles(N_k*d, Br)", "four times what one of Br threads with a query of its own has to do"
            ),
            Share(
                "shared memory", "12*N_k*d", "about five times what one of Br threads with a query of its own has to do"
            ),
        ),
        hints=(
            "Begin with 05_flash2: a block of threads has a tile of queries, one per thread, "
            "and walks through all keys. What lives in registers, what in shared memory, what in HBM?",
            "Registers: Q_i and O_i (d numbers each), m and l. Shared: K_j, V_j and a tile of scores, one column per "
            "thread. The threads load K_j and V_j together, then a barrier, then each does what 04_online does, for "
            "a tile of keys; then a barrier again.",
            "The kernel of 05_flash2 is nearly the answer, with d given to a function that makes the kernel. At the "
            "edges: threads past the last query load and store nothing of Q and O, but come to the barriers; the last "
            "tile of keys has min(Bc, N_k - j).",
        ),
        mistakes=(
            finite_start(guarded=False),
            finite_start(guarded=True),
            Mistake(MAXIMUM_WITHOUT_SCALE, maximum_without_scale),
            Mistake(NO_MAXIMUM, lambda Q, K, V, scale: no_maximum(scale * (Q @ K.T), V)),
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
