"""Exercises of lesson 02: one thread per score, one thread per row."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake, Share
from .common import LOWEST, SENTINEL, a_scale, cases, normal, weights

SCORES = ({"N": 20, "N_k": 50, "d": 13}, {"N": 1, "N_k": 1, "d": 1}, {"N": 32, "N_k": 16, "d": 8},
          {"N": 17, "N_k": 3, "d": 5})  # fmt: skip
COLUMN = (
    "the second index of Q and of K is a column, of which there are d: a score is the sum of Q[i, t] * K[j, t] for "
    "t in range(Q.shape[1])."
)


def scores(rng, N, N_k, d):
    return normal(rng, N, d, mean=0.5), normal(rng, N_k, d, mean=0.5), a_scale(rng)


def score_mistakes():
    return (
        Mistake("That is QKᵀ: it is not multiplied by scale.", lambda Q, K, scale: Q @ K.T),
        Mistake("It is multiplied by scale twice.", lambda Q, K, scale: scale * scale * (Q @ K.T)),
        Mistake(
            "The last column of Q and K does not take part: the loop over t ends one step too early.",
            lambda Q, K, scale: scale * (Q[:, :-1] @ K[:, :-1].T),
        ),
        Mistake("Only the first column of Q and K takes part.", lambda Q, K, scale: scale * np.outer(Q[:, 0], K[:, 0])),
        Mistake(
            "Only the last column of Q and K takes part: `acc` is replaced in each turn of the loop, not added to.",
            lambda Q, K, scale: scale * np.outer(Q[:, -1], K[:, -1]),
        ),
    )


def _rows(rng, N, N_k, special=True):
    """Scores of all sizes: rows far above what exp can take, far below, with −∞, all −∞, all LOWEST."""
    S = normal(rng, N, N_k, size=2.5)
    if special:
        S[1::7] += 500
        S[2::7] -= 400
        S[3::7, ::2] = -np.inf
        S[4::7] = -np.inf
        S[5::14] = LOWEST
    return (S,)


EXERCISES = (
    Exercise(
        name="02_scores",
        answer="scores",
        outputs=("S",),
        grid=("T", "T"),
        inputs=cases(4, scores, *SCORES),
        sizes=lambda Q, K, scale: {"N": len(Q), "N_k": len(K), "d": Q.shape[1]},
        bill=(
            Bound("Q", "loads", "N*N_k*d", "N·N_k threads, d each", "an element of Q is loaded twice by one thread"),
            Bound("K", "loads", "N*N_k*d", "N·N_k threads, d each", "an element of K is loaded twice by one thread"),
            Bound(
                "S",
                "stores",
                "N*N_k",
                "one per thread",
                "S[i, j] is stored at each step of the sum: add up in a variable, a register, and store once",
            ),
            Bound("S", "loads", "0", "S is a result", "the sum grows in S[i, j], in HBM: let it grow in a variable"),
        ),
        share=(Share("HBM", "2*d + 1", "a row of Q, a row of K and its own score"),),
        hints=(
            "One thread, one score. It needs two numbers, a query and a key. `cuda.grid(2)` gives both: which comes "
            "first?",
            "x comes first, and it runs along the keys. So j, i = cuda.grid(2). The guard asks for both, and the sum "
            "over t grows in a variable that begins at float32(0).",
            "if i < S.shape[0] and j < S.shape[1]:, in it acc = float32(0), the loop over t in range(Q.shape[1]) "
            "with acc += Q[i, t] * K[j, t], and S[i, j] = acc * scale.",
        ),
        mistakes=score_mistakes(),
        faults={
            **{f"OutOfBounds {x} 1": COLUMN for x in "QK"},
            "OutOfBounds": "the guard is missing, or i and j are exchanged: `cuda.grid(2)` gives x first, and x runs "
            "along the keys.",
            "unwritten": "i and j are exchanged: `cuda.grid(2)` gives x first, and x runs along the keys, so j, i = "
            "cuda.grid(2).",
            "UninitializedRead": "the sum begins in S[i, j], which holds nothing yet. Let it grow in a variable.",
            "RaceDetected": "several threads write one score. Each has its own pair of i and j, from cuda.grid(2).",
        },
    ),
    Exercise(
        name="02_softmax",
        answer="softmax",
        outputs=("P",),
        inputs=cases(
            5,
            _rows,
            {"N": 37, "N_k": 19},
            {"N": 1, "N_k": 1, "_special": False},
            {"N": 32, "N_k": 8},
            {"N": 5, "N_k": 40},
        ),
        sizes=lambda S: {"N": S.shape[0], "N_k": S.shape[1]},
        bill=(
            Bound(
                "S",
                "loads",
                "3*N*N_k",
                "three passes: for m, for l, for P",
                "a pass loads S[i, j] twice, or there is a fourth pass",
            ),
            Bound("P", "stores", "N*N_k", "each weight once", "P is stored in two passes: divide before you store"),
            Bound("P", "loads", "0", "P is a result", "P[i, j] is stored, loaded and divided: divide before you store"),
        ),
        share=(Share("HBM", "4*N_k", "three passes over its row and the stores"),),
        hints=(
            "Three loops over the row: the largest score m; the sum l of exp(S_ij - m); the weights. m begins at -∞, "
            "since a row may have scores below any number you could choose.",
            "If m is -∞ at the end of the first loop, S_ij - m would be nan. Any finite m will do there, 0 say: then "
            "all exponentials are 0. l is 0 then, and dividing by it is nan, too.",
            "After the first loop: if m is -∞, set m to float32(0). After the second: if l is 0, set l to "
            "float32(1). The third stores math.exp(S[i, j] - m) / l.",
        ),
        mistakes=(
            Mistake(
                "The row's maximum is not subtracted, and exp overflows: find m first.",
                lambda S: weights(S, m=np.float32(0)),
            ),
            Mistake(
                "The row's maximum is not subtracted, and exp overflows: find m first.",
                lambda S: weights(S, m=np.float32(0), guard=False),
            ),
            Mistake(
                "m begins at 0, not at -∞: where all scores are far below 0, all exponentials are 0.",
                lambda S: weights(S, m=np.maximum(S.max(axis=1, keepdims=True), 0)),
            ),
            Mistake(
                "m begins at 0, not at -∞: where all scores are far below 0, all exponentials are 0, and so is l.",
                lambda S: weights(S, m=np.maximum(S.max(axis=1, keepdims=True), 0), guard=False),
            ),
            Mistake(
                "m begins at a finite number, not at -∞: where all scores are lower still, all exponentials are 0.",
                lambda S: weights(S, m=np.maximum(S.max(axis=1, keepdims=True), SENTINEL)),
            ),
            Mistake(
                "m begins at a finite number, not at -∞: where all scores are lower still, l is 0, and 0/0 is nan.",
                lambda S: weights(S, m=np.maximum(S.max(axis=1, keepdims=True), SENTINEL), guard=False),
            ),
            Mistake(
                "A row of -∞ alone became nan: there, -∞ - (-∞) must not be computed, and l = 0 not divided by.",
                lambda S: weights(S, guard=False),
            ),
            Mistake(
                "The weights are not divided by their sum l.", lambda S: weights(S, l=np.ones((len(S), 1), np.float32))
            ),
            Mistake("That is the softmax of the columns: a row has one query and all keys.", lambda S: weights(S.T).T),
        ),
        faults={
            "RaceDetected": "a thread has one row, i; every P[i, j] is its own.",
            "UninitializedRead": "P is read before anything is in it.",
            "wrong": "look at the rows in which it is wrong: are their scores very large, very small, or -∞?",
        },
    ),
)
