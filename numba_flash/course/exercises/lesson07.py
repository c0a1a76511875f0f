"""Exercises of lesson 07: D, and P computed again."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake, Share
from .common import a_scale, cases, normal, qkv


def _backward(rng, N, N_k, d=8, high=False):
    """What the backward pass is given. high: scores beyond 100, too large for exp."""
    Q, K, V = qkv(rng, N, N_k, d)
    Q *= 16 if high else 1
    scale = a_scale(rng)
    S = scale * (Q @ K.T)
    m = S.max(axis=1)
    l = np.exp(S - m[:, None]).sum(axis=1)
    dO = normal(rng, N, d)
    O = np.exp(S - m[:, None]) @ V / l[:, None]
    return Q, K, V, dO, m + np.log(l), (dO * O).sum(axis=1), scale


EXP_OF_EACH = (
    "exp of a score beyond 88 is infinite, and so is exp(L): inf/inf is nan. Subtract first, exp(s * scale - L_i)."
)

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
        share=(Share("HBM", "2*d + 1", "its rows of dO and O, and one store"),),
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
        outputs=("dQ",),
        grid=("Br", None),
        inputs=cases(
            14,
            _backward,
            {"N": 37, "N_k": 21},
            {"N": 1, "N_k": 1},
            {"N": 32, "N_k": 40},
            {"N": 5, "N_k": 21, "_high": True},
        ),
        sizes=lambda Q, K, V, dO, L, D, scale: {"N": len(Q), "N_k": len(K)},
        bill=(
            *(
                Bound(x, "loads", "N*d", "each row once, into registers", f"{x} is loaded again: use {x}_i")
                for x in ("Q", "dO")
            ),
            *(Bound(x, "loads", "N", "once per query", f"{x} is loaded again in the hole: use {x}_i") for x in "LD"),
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
            Bound("dQ", "stores", "N*d", "each element once", "dQ is stored in the hole, too: use dQ_i"),
            Bound("dQ", "loads", "0", "dQ is a result", "the sum grows in dQ, in HBM: use dQ_i, in registers"),
        ),
        share=(
            Share(
                "HBM",
                "3*d + 2 + 2*tiles(N_k*d, Br)",
                "its rows of Q, dO and dQ, L, D, and 1/Br of each tile of K and V",
            ),
        ),
        hints=(
            "For each key of the tile two dot products of length d: S_ij needs Q_i and row c of K_j, dP_ij needs dO_i "
            "and row c of V_j. None of the two needs an array.",
            "P_ij = exp(S_ij - L_i): no maximum and no sum to look for. Do not forget the scale in S_ij. Then dS_ij "
            "= P_ij·(dP_ij - D_i), and dQ_i grows by dS_ij times row c of K_j.",
            "for c in range(keys): s and dp begin at float32(0) and grow in one loop over t; ds = math.exp(s * scale "
            "- L_i) * (dp - D_i); a second loop over t with dQ_i[t] += ds * K_j[c, t].",
        ),
        mistakes=(
            Mistake(
                "The score is not multiplied by scale, so that P is not that of the forward pass.",
                lambda *x: _dQ(*x, tau=1),
            ),
            Mistake(EXP_OF_EACH, lambda *x: _dQ_by_quotient(*x, of=lambda S, L: np.exp(S) / np.exp(L))),
            Mistake(EXP_OF_EACH, lambda *x: _dQ_by_quotient(*x, of=lambda S, L: np.exp(S) * np.exp(-L))),
            Mistake("D is not subtracted: dS = P ∘ (dP - D).", lambda *x: _dQ(*x[:5], 0 * x[5], x[6])),
            Mistake("L has the wrong sign: P = exp(S - L).", lambda *x: _dQ(*x, sign=-1)),
            Mistake("L is not used: exp(S) alone is not the weight.", lambda *x: _dQ(*x, sign=0)),
            Mistake("scale comes twice: dQ_i is multiplied by it after the loop.", lambda *x: _dQ(*x, out=x[6])),
            Mistake(
                "dS is dP - D here: it is not multiplied by P.",
                lambda Q, K, V, dO, L, D, s: s * ((dO @ V.T - D[:, None]) @ K),
            ),
            Mistake(
                "P stands where dS should: dS = P ∘ (dP - D).",
                lambda Q, K, V, dO, L, D, s: s * (np.exp(s * (Q @ K.T) - L[:, None]) @ K),
            ),
            Mistake(
                "Only the last key counts: dQ_i[t] is replaced, not added to.",
                lambda Q, K, V, dO, L, D, s: s * np.outer(_dS(Q, K, V, dO, L, D, s)[:, -1], K[-1]),
            ),
        ),
        faults={
            "OutOfBounds": "rows of K_j and V_j are keys of the tile, c; there are `keys` of them.",
            "UninitializedRead": "the last tile has fewer than Bc keys: loop over range(keys).",
            "RaceDetected": "K_j and V_j are read in the hole, and not written.",
        },
    ),
)


def _dS(Q, K, V, dO, L, D, scale, *, tau=None, out=1, sign=1):
    P = np.exp((scale if tau is None else tau) * (Q @ K.T) - sign * L[:, None])
    return out * P * (dO @ V.T - D[:, None])


def _dQ(Q, K, V, dO, L, D, scale, **slip):
    return scale * (_dS(Q, K, V, dO, L, D, scale, **slip) @ K)


def _dQ_by_quotient(Q, K, V, dO, L, D, scale, *, of):
    return scale * (of(scale * (Q @ K.T), L[:, None]) * (dO @ V.T - D[:, None])) @ K
