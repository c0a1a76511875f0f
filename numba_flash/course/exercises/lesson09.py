"""The exercise of lesson 09: Z is drawn again, not loaded."""

import numpy as np

from ... import dropout
from ..exercise import Bound, Exercise, Mistake, Share, constants
from .common import cases, normal, weights

(T,) = constants("09_dropout", "T")


def _inputs(rng, H, N, N_k):
    P = np.stack([weights(normal(rng, N, N_k)) for _ in range(H)])
    return P, normal(rng, H, N, N_k), normal(rng, H, N), np.uint64(5 + N), np.float64(rng.uniform(0.2, 0.5))


def _dS(P, dP, D, Z):
    return (P * (Z * dP - D[:, :, None])).astype(np.float32)


def _Z(P, seed, p_drop):
    return dropout.to_dense(seed, p_drop, *P.shape)


def _by_place_in_block(P, seed, p_drop):
    Z = dropout.to_dense(seed, p_drop, len(P), T, T)
    return Z[:, np.arange(P.shape[1]) % T][:, :, np.arange(P.shape[2]) % T]


def _exchanged(P, seed, p_drop):
    H, N, N_k = P.shape
    return dropout.to_dense(seed, p_drop, H, N_k, N).swapaxes(1, 2)


EXERCISES = (
    Exercise(
        name="09_dropout",
        answer="backward",
        outputs=("dS",),
        inputs=cases(
            17, _inputs, {"H": 3, "N": 19, "N_k": 21}, {"H": 1, "N": 1, "N_k": 1}, {"H": 2, "N": 16, "N_k": 8}
        ),
        sizes=lambda P, *rest: dict(zip(("H", "N", "N_k"), P.shape)),
        bill=(
            *(
                Bound(x, "loads", "H*N*N_k", "one per thread", f"{x} is loaded twice by one thread")
                for x in ("P", "dP", "D")
            ),
            Bound("dS", "stores", "H*N*N_k", "one per thread", "dS is stored twice"),
            Bound("dS", "loads", "0", "dS is a result", "dS is read: what is in between belongs in a variable"),
        ),
        share=(Share("HBM", "4", "three loads and a store"),),
        hints=(
            "Nothing is loaded that is not in the signature. `keep` needs five arguments, and this thread knows all "
            "of them.",
            "z = keep(seed, p_drop, h, i, j): head, query, key, each counted over the whole matrix. z is 0, or 1/(1 "
            "- p) already.",
            "dS[h, i, j] = P[h, i, j] * (z * dP[h, i, j] - D[h, i]).",
        ),
        mistakes=(
            Mistake("Z is left out: that is dS without dropout.", lambda P, dP, D, s, p: _dS(P, dP, D, 1)),
            Mistake(
                "Z multiplies D, too: only dP is dropped, dS = P ∘ (Z ∘ dP - D).",
                lambda P, dP, D, s, p: (P * _Z(P, s, p) * (dP - D[:, :, None])).astype(np.float32),
            ),
            Mistake("Every head draws the Z of head 0.", lambda P, dP, D, s, p: _dS(P, dP, D, _Z(P, s, p)[:1])),
            Mistake(
                "Query and key are exchanged in keep(seed, p_drop, h, i, j): the place of a score is (i, j).",
                lambda P, dP, D, s, p: _dS(P, dP, D, _exchanged(P, s, p)),
            ),
            Mistake(
                "Z is drawn for the place in the block, threadIdx, so that it depends on the tiles. The place must "
                "be that in the whole matrix.",
                lambda P, dP, D, s, p: _dS(P, dP, D, _by_place_in_block(P, s, p)),
            ),
            Mistake(
                "What is kept is multiplied by 1/(1 - p) twice: `keep` does that already.",
                lambda P, dP, D, s, p: _dS(P, dP, D, _Z(P, s, p) / (1 - p)),
            ),
            Mistake(
                "What is kept is not multiplied by 1/(1 - p): use z itself, not only whether it is 0.",
                lambda P, dP, D, s, p: _dS(P, dP, D, _Z(P, s, p) != 0),
            ),
        ),
        faults={"RaceDetected": "each thread has one place (h, i, j)."},
    ),
)
