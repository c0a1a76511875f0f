"""Exercises of lesson 03: products through shared tiles."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake, Share, constants
from .common import cases, normal
from .lesson02 import score_mistakes, scores

SIZES = ({"N": 19, "N_k": 37, "d": 13}, {"N": 1, "N_k": 1, "d": 1}, {"N": 16, "N_k": 8, "d": 16},
         {"N": 9, "N_k": 3, "d": 5})  # fmt: skip
(T,) = constants("03_tile", "T")  # 03_output has the same
RACE = ("a barrier is missing. After the loads: no thread may read a tile before all have loaded their part. After "
        "the sum: no thread may load the next tile while another still reads this one.")  # fmt: skip


def _rows_of_tile(X, at):
    """For each of the first numbers its place in the tile `at`, as rows of X; zeros past the end."""
    return np.where((at < len(X))[:, None], X[np.minimum(at, len(X) - 1)], 0)


def _by_query_row(Q, K, scale):
    """K_j[ty, t] in place of K_j[tx, t]."""
    S = np.empty((len(Q), len(K)), np.float32)
    for i in range(len(Q)):
        S[i] = _rows_of_tile(K, np.arange(len(K)) // T * T + i % T) @ Q[i] * scale
    return S


def _diagonal_tile(Q, K, scale):
    """K_j[ty, tx] = K[col, t0 + tx], by thread (tx, ty): element (r, c) of the tile is K[first + c, t0 + c]."""
    S = np.zeros((len(Q), len(K)), np.float32)
    d = Q.shape[1]
    for t in range(d):
        key = np.arange(len(K)) // T * T + t % T
        S += np.outer(Q[:, t], np.where(key < len(K), K[np.minimum(key, len(K) - 1), t], 0))
    return scale * S


def _across(P, V):
    O = np.zeros((len(P), V.shape[1]), np.float32)
    padded = np.zeros((-(-len(V) // T) * T, -(-V.shape[1] // T) * T), np.float32)
    padded[: len(V), : V.shape[1]] = V
    for j0 in range(0, len(V), T):
        for c0 in range(0, V.shape[1], T):
            part = padded[j0 : j0 + T, c0 : c0 + T].T
            keys, columns = min(T, len(V) - j0), min(T, V.shape[1] - c0)
            O[:, c0 : c0 + columns] += P[:, j0 : j0 + keys] @ part[:keys, :columns]
    return O


def _across_keys(Q, K, scale):
    """K_j[t, tx] in place of K_j[tx, t]."""
    S = np.zeros((len(Q), len(K)), np.float32)
    for t in range(-(-Q.shape[1] // T) * T):
        rows = _rows_of_tile(K, np.arange(len(K)) // T * T + t % T)
        columns = t // T * T + np.arange(len(K)) % T
        inside = columns < K.shape[1]
        key = np.where(inside, rows[np.arange(len(K)), np.minimum(columns, K.shape[1] - 1)], 0)
        S += np.outer(Q[:, t], key) if t < Q.shape[1] else 0
    return scale * S


def _first_keys(P, V, length):
    """The keys of as many tiles as there are along another length."""
    keys = -(-length // T) * T
    return P[:, :keys] @ V[:keys]


EXERCISES = (
    Exercise(
        name="03_tile",
        answer="scores",
        outputs=("S",),
        grid=("T", "T"),
        inputs=cases(6, scores, *SIZES),
        sizes=lambda Q, K, scale: {"N": len(Q), "N_k": len(K), "d": Q.shape[1]},
        bill=(
            Bound(
                "Q",
                "loads",
                "N*d*tiles(N_k, T)",
                "once per column of tiles of S",
                "Q is not taken from its tile: in the sum, use Q_i[ty, t]",
            ),
            Bound(
                "K",
                "loads",
                "N_k*d*tiles(N, T)",
                "once per row of tiles of S",
                "K is not taken from its tile: in the sum, use K_j[tx, t]",
            ),
            Bound("S", "stores", "N*N_k", "one per thread", "S is stored in the hole, too"),
            Bound("S", "loads", "0", "S is a result", "the sum grows in S: it belongs in `acc`"),
        ),
        share=(
            Share("HBM", "2*tiles(d, T) + 1", "one element of each tile per step, and its own score"),
            Share("shared memory", "4*tiles(d, T)*(T + 1)", "twice what it takes: two stores and 2·T reads per step"),
        ),
        hints=(
            "A thread does not load what it uses: it loads its share of both tiles, one element each. Then it waits. "
            "Then it uses a row of Q_i and a row of K_j.",
            "Thread (tx, ty) loads Q_i[ty, tx], of row `row` and column t0 + tx of Q. Row ty of K_j is key number "
            "blockIdx.x * T + ty of K: not `col`, which is the key in row tx.",
            "Q_i[ty, tx] = load_or_zero(Q, row, t0 + tx); K_j[ty, tx] = load_or_zero(K, cuda.blockIdx.x * T + ty, t0 "
            "+ tx); a barrier; the sum of Q_i[ty, t] * K_j[tx, t] over t in range(T); a barrier.",
        ),
        mistakes=(
            *score_mistakes(),
            Mistake(
                "The row of K_j is wrong in the sum: row ty belongs to the key of another thread; yours is tx.",
                _by_query_row,
            ),
            Mistake(
                "K_j is used across, as K_j[t, tx]: its rows are keys, so the key of the thread is K_j[tx, t].",
                _across_keys,
            ),
            Mistake(
                "Only whole tiles along d take part: the last one, which hangs over the edge, is left out.",
                lambda Q, K, scale: scale * (Q[:, : Q.shape[1] // T * T] @ K[:, : K.shape[1] // T * T].T),
            ),
            Mistake(
                "Only the first T columns of Q and K take part: each step must load from column t0 on.",
                lambda Q, K, scale: scale * -(-Q.shape[1] // T) * (Q[:, :T] @ K[:, :T].T),
            ),
            Mistake(
                "K_j holds row `col` in its row ty: row ty of the tile belongs to key blockIdx.x * T + ty.",
                _diagonal_tile,
            ),
        ),
        faults={
            "RaceDetected": RACE,
            "BarrierDivergence": "a barrier stands inside an `if`. Idle threads must come to it, too.",
            "UninitializedRead": "an element of a tile is used that no thread has loaded. Each thread loads one of "
            "Q_i and one of K_j, at [ty, tx].",
            "OutOfBounds": "a tile hangs over the edge: load with load_or_zero, which gives 0 there.",
        },
    ),
    Exercise(
        name="03_output",
        answer="output",
        outputs=("O",),
        grid=("T", "T"),
        inputs=cases(
            7,
            lambda rng, N, N_k, d: (np.abs(normal(rng, N, N_k)) / N_k, normal(rng, N_k, d, mean=1.0)),
            {"N": 19, "N_k": 37, "d": 13},
            {"N": 1, "N_k": 1, "d": 1},
            {"N": 8, "N_k": 16, "d": 24},
            {"N": 5, "N_k": 3, "d": 9},
        ),
        sizes=lambda P, V: {"N": len(P), "N_k": len(V), "d": V.shape[1]},
        bill=(
            Bound(
                "P",
                "loads",
                "N*N_k*tiles(d, T)",
                "once per column of tiles of O",
                "P is not taken from its tile: in the sum, use P_ij[ty, j]",
            ),
            Bound(
                "V",
                "loads",
                "N_k*d*tiles(N, T)",
                "once per row of tiles of O",
                "V is not taken from its tile: in the sum, use V_j[j, tx]",
            ),
            Bound("O", "stores", "N*d", "one per thread", "O is stored at each step of the loop: add up in a variable"),
            Bound("O", "loads", "0", "O is a result", "the sum grows in O, in HBM: let it grow in a variable"),
        ),
        share=(
            Share("HBM", "2*tiles(N_k, T) + 1", "one element of each tile per step, and its own element of O"),
            Share("shared memory", "4*tiles(N_k, T)*(T + 1)", "twice what it takes: two stores and 2·T reads per step"),
        ),
        hints=(
            "O[row, col] needs row `row` of P and column `col` of V. A block of O needs T rows of P and T columns of "
            "V. Which of the three lengths N, N_k and d do you walk along?",
            "Along the keys, N_k. Thread (tx, ty) loads P[row, j0 + tx] into P_ij[ty, tx] and V[j0 + ty, col] into "
            "V_j[ty, tx]: the column of V is that of the thread, its row changes from step to step.",
            "As in 03_tile: row and col, acc, the loop over j0, two loads, barrier, sum of P_ij[ty, j] * V_j[j, tx], "
            "barrier; after the loop the guard and the store.",
        ),
        mistakes=(
            Mistake(
                "Only whole tiles of keys take part: the last one, which hangs over the edge, is left out.",
                lambda P, V: P[:, : len(V) // T * T] @ V[: len(V) // T * T],
            ),
            Mistake(
                "Only the first T keys take part: each step must load from key j0 on, in P and in V.",
                lambda P, V: -(-len(V) // T) * (P[:, :T] @ V[:T]),
            ),
            Mistake(
                "Only the last tile of keys counts: `acc` begins anew at each step.",
                lambda P, V: P[:, (len(V) - 1) // T * T :] @ V[(len(V) - 1) // T * T :],
            ),
            Mistake(
                "The loop walks along d, in steps up to V.shape[1]. It is along the keys: P.shape[1], or V.shape[0].",
                lambda P, V: _first_keys(P, V, V.shape[1]),
            ),
            Mistake(
                "The loop walks along the queries, in steps up to P.shape[0]. It is along the keys: P.shape[1].",
                lambda P, V: _first_keys(P, V, len(P)),
            ),
            Mistake("V_j is used as V_j[tx, j], across; its rows are keys, so it is V_j[j, tx].", _across),
        ),
        faults={
            "RaceDetected": RACE,
            "BarrierDivergence": "a barrier stands inside an `if`. Idle threads must come to it, too.",
            "UninitializedRead": "an element of a tile is used that no thread has loaded. Each thread loads one of "
            "P_ij and one of V_j, at [ty, tx].",
            "OutOfBounds": "a tile hangs over the edge: load with load_or_zero, and guard the store.",
            "unwritten": "the guard asks for the wrong lengths: O has N rows and d columns, P has N_k columns.",
        },
    ),
)
