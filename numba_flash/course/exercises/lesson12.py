"""The exercise of lesson 12: several scores per thread, in registers."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake, Share, constants
from .common import cases
from .lesson02 import scores

(T,) = constants("12_registers", "T")
AGAIN = (
    "an element is loaded from shared memory again for each product that it is a part of. Take 4 elements of each tile "
    "into registers, then multiply 16 times."
)


def _tiles(X, across):
    """X (n, d), filled up with 0 -> tile, row in it, step along d, column in it; across: rows and columns exchanged."""
    n, d = (-(-length // T) for length in X.shape)
    whole = np.zeros((n * T, d * T), np.float32)
    whole[: len(X), : X.shape[1]] = X
    tiles = whole.reshape(n, T, d, T)
    return tiles.swapaxes(1, 3) if across else tiles


def _slip(row=lambda x, y, u, w: y + 4 * u, key=lambda x, y, u, w: x + 4 * w, *, added=lambda u, w: True,
          across=(False, False), columns=slice(None), steps=slice(None)):  # fmt: skip
    """outputs() of a Mistake. row, key: what thread (x, y) takes S_ij[u, w] for the score of; added: whether it does.

    across: whether Q_i and K_j are used so. columns, steps: which columns of a step, and which steps, take part.
    """
    r, c = np.indices((T, T))
    x, y, u, w = c % 4, r % 4, r // 4, c // 4  # who stores there, and from where

    def outputs(Q, K, scale):
        Q_i, K_j = (_tiles(X, turned)[:, :, steps, columns] for X, turned in zip((Q, K), across, strict=True))
        S = np.einsum("irst,jcst->ijrc", Q_i, K_j)[:, :, row(x, y, u, w), key(x, y, u, w)] * added(u, w)
        return scale * S.swapaxes(1, 2).reshape(len(S) * T, -1)[: len(Q), : len(K)]

    return outputs


EXERCISES = (
    Exercise(
        name="12_registers",
        answer="scores",
        outputs=("S",),
        grid=("T", "T"),
        inputs=cases(
            21,
            scores,
            {"N": 35, "N_k": 21, "d": 32},
            {"N": 1, "N_k": 1, "d": 1},
            {"N": 16, "N_k": 32, "d": 16},
            {"N": 9, "N_k": 3, "d": 37},
        ),
        sizes=lambda Q, K, scale: {"N": len(Q), "N_k": len(K), "d": Q.shape[1]},
        bill=(
            Bound(
                "Q",
                "loads",
                "N*d*tiles(N_k, T)",
                "once per column of tiles of S",
                "Q is loaded again in the hole: take q[u] from its tile, Q_i[y + 4 * u, t]",
            ),
            Bound(
                "K",
                "loads",
                "N_k*d*tiles(N, T)",
                "once per row of tiles of S",
                "K is loaded again in the hole: take k[u] from its tile, K_j[x + 4 * u, t]",
            ),
            Bound("S", "stores", "N*N_k", "each score once, at the end", "S is stored in the hole, too: use S_ij"),
            Bound("S", "loads", "0", "S is a result", "the sums grow in S, in HBM: they belong in S_ij"),
        ),
        share=(
            Share("HBM", "2*T*tiles(d, T) + 16", "1/16 of each tile, and its 16 scores"),
            Share(
                "shared memory",
                "10*T*tiles(d, T)",
                "8 loads per column of a step and its part of the stores, 2·T per step",
                alike=1,
                likely=AGAIN,
            ),
        ),
        hints=(
            "Which elements do the 16 scores of a thread share? At column t there are 4 of Q_i and 4 of K_j, and each "
            "is a part of 4 products. So load first, then multiply.",
            "A loop over the T columns of the step, and in it two parts: a loop over u in range(4) that fills q[u] and "
            "k[u], then two loops, over u and w, that add to S_ij[u, w]. Q_i[y, t] is column t of the first row.",
            "for t in range(T): q[u] = Q_i[y + 4 * u, t] and k[u] = K_j[x + 4 * u, t] for u in range(4); then S_ij[u, "
            "w] += q[u] * k[w] for u in range(4), for w in range(4).",
        ),
        mistakes=(
            Mistake("S_ij is still 0: nothing was added to it.", lambda Q, K, scale: 0 * (Q @ K.T)),
            Mistake(
                "It is multiplied by scale twice: the last line of the kernel does that.",
                lambda Q, K, scale: scale * scale * (Q @ K.T),
            ),
            Mistake(
                "x and y are exchanged: y counts rows, those of Q_i, and x counts keys, the rows of K_j.",
                _slip(lambda x, y, u, w: x + 4 * u, lambda x, y, u, w: y + 4 * w),
            ),
            Mistake(
                "u and w are exchanged: S_ij[u, w] is the score of q[u] and k[w].",
                _slip(lambda x, y, u, w: y + 4 * w, lambda x, y, u, w: x + 4 * u),
            ),
            Mistake(
                "S_ij[u, w] has the key of u: it is the score of q[u] and k[w].",
                _slip(key=lambda x, y, u, w: x + 4 * u),
            ),
            Mistake(
                "S_ij[u, w] has the row of w: it is the score of q[u] and k[w].",
                _slip(lambda x, y, u, w: y + 4 * w),
            ),
            Mistake(
                "Rows and keys are those of four neighbours, 4 * y + u and 4 * x + w. The thread owns every fourth, y "
                "+ 4 * u and x + 4 * w: so the stores have them.",
                _slip(lambda x, y, u, w: 4 * y + u, lambda x, y, u, w: 4 * x + w),
            ),
            Mistake(
                "The rows are four neighbours, 4 * y + u. The thread owns every fourth, y + 4 * u: so the stores have "
                "them.",
                _slip(lambda x, y, u, w: 4 * y + u),
            ),
            Mistake(
                "The keys are four neighbours, 4 * x + w. The thread owns every fourth, x + 4 * w: so the stores have "
                "them.",
                _slip(key=lambda x, y, u, w: 4 * x + w),
            ),
            Mistake(
                "All scores of a thread are that of its first row and its first key: q[u] is of row y + 4 * u, and "
                "k[w] of key x + 4 * w.",
                _slip(lambda x, y, u, w: y, lambda x, y, u, w: x),
            ),
            Mistake(
                "Only one row of the thread takes part: q[u] is of row y + 4 * u, for u in range(4).",
                _slip(lambda x, y, u, w: y),
            ),
            Mistake(
                "Only one key of the thread takes part: k[w] is of key x + 4 * w, for w in range(4).",
                _slip(key=lambda x, y, u, w: x),
            ),
            Mistake(
                "Only the first row of S_ij grows: the thread owns 4 rows, so there are 16 products.",
                _slip(added=lambda u, w: u == 0),
            ),
            Mistake(
                "Only the first column of S_ij grows: the thread owns 4 keys, so there are 16 products.",
                _slip(added=lambda u, w: w == 0),
            ),
            Mistake(
                "Only 4 of the 16 products are added, those of q[u] and k[u]: each of q is multiplied by each of k.",
                _slip(added=lambda u, w: u == w),
            ),
            *(
                Mistake(
                    f"{what} used across: the rows of a tile are queries or keys, and t is its second index.",
                    _slip(across=across),
                )
                for what, across in (
                    ("Q_i is", (True, False)),
                    ("K_j is", (False, True)),
                    ("Q_i and K_j are", (True, True)),
                )
            ),
            Mistake(
                "The last column of each step does not take part: the loop over t ends one step too early.",
                _slip(columns=slice(T - 1)),
            ),
            Mistake("Only the first column of each step takes part.", _slip(columns=slice(1))),
            Mistake(
                "Only the last column of each step takes part: the products stand after the loop over t, not in it.",
                _slip(columns=slice(T - 1, None)),
            ),
            Mistake(
                "Only the last column of the last step counts: S_ij[u, w] is replaced at each column, not added to.",
                _slip(columns=slice(T - 1, None), steps=slice(-1, None)),
            ),
            Mistake(
                "Only the last step along d counts: S_ij begins anew at each step.",
                _slip(steps=slice(-1, None)),
            ),
        ),
        faults={
            "RaceDetected": "the hole reads the tiles, and stores to neither. What a thread adds to is its own: S_ij.",
            "BarrierDivergence": "the barriers around the hole are all that is needed.",
            "UninitializedRead": "q[u] and k[u] are loaded before they are multiplied, at each column; and a tile has "
            "T columns, whatever d is: t in range(T).",
            "OutOfBounds": "a row of Q_i is y + 4 * u, one of K_j x + 4 * u, and t is in range(T), whatever d is. What "
            "is outside of Q and K is 0 in the tiles: nothing is to be guarded.",
            "wrong": "take one score: S_ij[1, 0] of thread (x, y) is the product of row y + 4 of Q_i and row x of K_j.",
        },
    ),
)
