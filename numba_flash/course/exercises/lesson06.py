"""The exercise of lesson 06: recompute instead of store."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake, Share
from .common import (
    MAXIMUM_WITHOUT_SCALE,
    NO_MAXIMUM,
    attention_inputs,
    cases,
    finite_start,
    maximum_without_scale,
    no_maximum,
    weights,
)

EXERCISES = (
    Exercise(
        name="06_no_matrix",
        answer="attention",
        outputs=("O",),
        inputs=cases(
            12,
            lambda rng, N, N_k, **how: attention_inputs(rng, N, N_k, 8, **how),
            {"N": 37, "N_k": 21},
            {"N": 1, "N_k": 1},
            {"N": 32, "N_k": 40},
            {"N": 3, "N_k": 1000},
            {"N": 5, "N_k": 21, "_high": True},
            {"N": 3, "N_k": 5, "_low": True},
        ),
        sizes=lambda Q, K, V, scale: {"N": len(Q), "N_k": len(K)},
        bill=(
            Bound("Q", "loads", "N*d", "each row once, into Q_i", "Q is loaded for each key: use Q_i, in registers"),
            Bound(
                "K",
                "loads",
                "2*N*N_k*d",
                "two passes of each query over all keys",
                "there is a third pass over the keys: l and the sum for O can grow in the same one",
            ),
            Bound("V", "loads", "N*N_k*d", "one pass of each query", "V is loaded in more than one pass"),
            Bound("O", "stores", "N*d", "each element once", "O is stored for each key: let O_i grow, in registers"),
            Bound("O", "loads", "0", "O is a result", "the sum grows in O, in HBM: use O_i, in registers"),
        ),
        share=(Share("HBM", "2*d + 3*N_k*d", "its rows of Q and O, K twice and V once"),),
        hints=(
            "Forget that a score is expensive. Write a loop over the keys that computes the score and does one thing "
            "with it: the maximum.",
            "The second loop computes the same score in the same way. Now m is known: p = exp(s·scale - m). l grows "
            "by p, and O_i[t] by p·V[j, t].",
            "Two loops over j, each with s = float32(0) and s += Q_i[t] * K[j, t] over t; the first ends in m = "
            "max(m, s * scale), the second in p, l and O_i; at last O[i, t] = O_i[t] / l.",
        ),
        mistakes=(
            finite_start(guarded=False),
            finite_start(guarded=True),
            Mistake(MAXIMUM_WITHOUT_SCALE, maximum_without_scale),
            Mistake(NO_MAXIMUM, lambda Q, K, V, scale: no_maximum(scale * (Q @ K.T), V)),
            Mistake(
                "The scores are not multiplied by scale in the second pass, where the weights are formed. (In the "
                "first one it would not show: m cancels.)",
                lambda Q, K, V, scale: weights(Q @ K.T) @ V,
            ),
            Mistake(
                "O is not divided by l.",
                lambda Q, K, V, scale: weights(scale * (Q @ K.T), l=np.ones((len(Q), 1), np.float32)) @ V,
            ),
            Mistake(
                "Only the last key counts: O_i[t] is replaced, not added to.",
                lambda Q, K, V, scale: weights(scale * (Q @ K.T))[:, -1:] @ V[-1:],
            ),
        ),
        faults={
            "RaceDetected": "a thread has one query, i.",
            "UninitializedRead": "a variable or O is read too early.",
        },
    ),
)
