"""Exercises of lesson 07: D, and P computed again."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake
from .common import SCALE, cases, normal, qkv


def _backward(rng, N, N_k, d):
    Q, K, V = qkv(rng, N, N_k, d)
    S = SCALE * (Q @ K.T)
    m = S.max(axis=1)
    l = np.exp(S - m[:, None]).sum(axis=1)
    dO = normal(rng, N, d)
    O = np.exp(S - m[:, None]) @ V / l[:, None]
    return Q, K, V, dO, m + np.log(l), (dO * O).sum(axis=1), SCALE


def _dS(Q, K, V, dO, L, D, scale, *, tau=None, out=1, sign=1):
    P = np.exp((scale if tau is None else tau) * (Q @ K.T) - sign * L[:, None])
    return out * P * (dO @ V.T - D[:, None])


EXERCISES = (
    Exercise(
        name="07_delta",
        answer="rowsum",
        outputs=("D",),
        inputs=cases(
            13,
            lambda rng, N, d: (normal(rng, N, d), normal(rng, N, d, mean=1.0)),
            {"N": 37, "d": 13},
            {"N": 1, "d": 1},
            {"N": 32, "d": 8},
            {"N": 33, "d": 40},
        ),
        sizes=lambda dO, O: {"N": len(O), "d": O.shape[1]},
        bill=(
            Bound("dO", "loads", "N*d", "each element once", "an element of dO is loaded twice"),
            Bound("O", "loads", "N*d", "each element once", "an element of O is loaded twice"),
            Bound("D", "stores", "N", "once per row", "D[i] is stored at each step of the sum: add up in a variable"),
            Bound("D", "loads", "0", "D is a result", "the sum grows in D[i], in HBM: let it grow in a variable"),
        ),
        hints=(
            "∘ is the product element by element, and rowsum the sum of a row. So D_i has d terms.",
            "One row per thread: `row_sum` in lesson 00 is the pattern. Here each term is a product of two elements.",
            "i = cuda.grid(1), the guard, D_i = float32(0), the loop over t in range(O.shape[1]) with D_i += dO[i, "
            "t] * O[i, t], and D[i] = D_i.",
        ),
        mistakes=(
            Mistake("That is the row sum of O alone: dO is left out.", lambda dO, O: O.sum(axis=1)),
            Mistake("That is the row sum of dO alone: O is left out.", lambda dO, O: dO.sum(axis=1)),
            Mistake(
                "That is the product of two sums. D is the sum of products: multiply first, then add.",
                lambda dO, O: dO.sum(axis=1) * O.sum(axis=1),
            ),
            Mistake(
                "Only the last column counts: the sum begins anew at each step, or is replaced.",
                lambda dO, O: dO[:, -1] * O[:, -1],
            ),
        ),
        faults={
            "OutOfBounds": "the guard is missing, or the two indices are exchanged: rows come first, O[i, t].",
            "UninitializedRead": "the sum begins in D[i], which holds nothing yet. Let it grow in a variable.",
            "RaceDetected": "several threads write one D[i]: a thread has one row, cuda.grid(1).",
        },
    ),
    Exercise(
        name="07_recompute",
        answer="backward",
        outputs=("dS",),
        grid=("T", "T"),
        inputs=cases(
            14, _backward, {"N": 19, "N_k": 37, "d": 7}, {"N": 1, "N_k": 1, "d": 1}, {"N": 16, "N_k": 32, "d": 8}
        ),
        sizes=lambda Q, K, V, dO, L, D, scale: {"N": len(Q), "N_k": len(K), "d": Q.shape[1]},
        bill=(
            *(
                Bound(
                    x,
                    "loads",
                    "N*N_k*d",
                    "N·N_k threads, d each",
                    f"an element of {x} is loaded twice by one thread: S_ij and dP_ij can grow in the same loop",
                )
                for x in ("Q", "K", "V", "dO")
            ),
            *(
                Bound(x, "loads", "N*N_k", "one per thread", f"{x}[i] is loaded in a loop: once is enough")
                for x in "LD"
            ),
            Bound("dS", "stores", "N*N_k", "one per thread", "dS[i, j] is stored twice"),
            Bound("dS", "loads", "0", "dS is a result", "dS is read: what is in between belongs in a variable"),
        ),
        hints=(
            "Two dot products of length d: S_ij needs row i of Q and row j of K, dP_ij row i of dO and row j of V.",
            "P_ij = exp(S_ij - L_i): no maximum and no sum to look for. Do not forget the scale in S_ij. Then dS_ij "
            "= P_ij·(dP_ij - D_i).",
            "s and dp begin at float32(0) and grow in one loop over t; p = math.exp(s * scale - L[i]); dS[i, j] = p "
            "* (dp - D[i]).",
        ),
        mistakes=(
            Mistake(
                "The score is not multiplied by scale, so that P is not that of the forward pass.",
                lambda *x: _dS(*x, tau=1),
            ),
            Mistake("D is not subtracted: dS = P ∘ (dP - D).", lambda *x: _dS(*x[:5], 0 * x[5], x[6])),
            Mistake("L has the wrong sign: P = exp(S - L).", lambda *x: _dS(*x, sign=-1)),
            Mistake("L is not used: exp(S) alone is not the weight.", lambda *x: _dS(*x, sign=0)),
            Mistake("That is scale·dS. The scale comes in later, in dQ and dK.", lambda *x: _dS(*x, out=x[6])),
            Mistake("That is dP - D: it is not multiplied by P.", lambda Q, K, V, dO, L, D, s: dO @ V.T - D[:, None]),
            Mistake("That is P, not dS.", lambda Q, K, V, dO, L, D, s: np.exp(s * (Q @ K.T) - L[:, None])),
        ),
        faults={"OutOfBounds": "rows of Q, dO, L and D are queries, i; rows of K and V are keys, j."},
    ),
)
