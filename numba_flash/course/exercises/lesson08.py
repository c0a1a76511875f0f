"""Exercises of lesson 08: causal order, and the tiles that it hides."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake, Share, constants
from .common import a_scale, cases, causal, qkv, weights
from .lesson02 import scores

(Br,) = constants("08_skip", "Br")


def _hidden(Q, K, scale, seen, value=-np.inf):
    return np.where(seen, scale * (Q @ K.T), np.float32(value))


def _skipped(Q, K, V, scale, seen):
    return weights(_hidden(Q, K, scale, seen)) @ V


def _keys(N, N_k):
    """The number of keys that each tile of Br queries sees."""
    return [min(max(min(b + Br, N) + N_k - N, 0), N_k) for b in range(0, N, Br)]


def _of_first(N, N_k):
    """Which pairs are seen if a tile of queries goes through the keys that its first query sees."""
    ends = np.repeat([max(b + 1 + N_k - N, 0) for b in range(0, N, Br)], Br)[:N]
    return causal(N, N_k) & (np.arange(N_k) < ends[:, None])


def _of_unaligned(N, N_k):
    ends = np.repeat([min(b + Br, N) for b in range(0, N, Br)], Br)[:N]
    return causal(N, N_k) & (np.arange(N_k) < ends[:, None])


EXERCISES = (
    Exercise(
        name="08_causal",
        answer="scores",
        outputs=("S",),
        grid=("T", "T"),
        inputs=cases(
            15,
            scores,
            {"N": 19, "N_k": 37, "d": 7},
            {"N": 1, "N_k": 1, "d": 1},
            {"N": 20, "N_k": 20, "d": 4},
            {"N": 37, "N_k": 19, "d": 7},
        ),
        sizes=lambda Q, K, scale: {
            "N": len(Q),
            "N_k": len(K),
            "d": Q.shape[1],
            "seen": int(causal(len(Q), len(K)).sum()),
        },
        bill=(
            *(
                Bound(
                    x,
                    "loads",
                    "seen*d",
                    "d for each pair that is seen",
                    "the product is formed for hidden pairs, too: ask first, then multiply",
                )
                for x in "QK"
            ),
            Bound("S", "stores", "N*N_k", "one per thread", "S[i, j] is stored twice: use if and else"),
            Bound("S", "loads", "0", "S is a result", "the sum grows in S, in HBM: let it grow in a variable"),
        ),
        share=(Share("HBM", "2*d + 1", "a row of Q, a row of K and its own score"),),
        hints=(
            "Draw the table of lesson 08 for N = 2, N_k = 5: which keys does query 0 see, which query 1?",
            "The last query sees all keys: j ≤ i + N_k - N. With N = N_k that is j ≤ i. A key at the same place is "
            "seen.",
            "if j <= i + N_k - N: the sum over t in `acc`, and S[i, j] = acc * scale; else: S[i, j] = "
            "float32(-math.inf).",
        ),
        mistakes=(
            Mistake(
                "The first query is aligned with the first key here. The last query belongs to the last key: j ≤ i + "
                "N_k - N.",
                lambda Q, K, s: _hidden(Q, K, s, causal(len(Q), len(K), 0)),
            ),
            Mistake(
                "A query does not see the key at its own place: it should, so ≤ and not <.",
                lambda Q, K, s: _hidden(Q, K, s, causal(len(Q), len(K), len(K) - len(Q) - 1)),
            ),
            Mistake(
                "The wrong side is hidden: a query sees the keys up to itself, not those after it.",
                lambda Q, K, s: _hidden(Q, K, s, ~causal(len(Q), len(K), len(K) - len(Q) - 1)),
            ),
            Mistake(
                "The wrong side is hidden: a query sees the keys up to itself, not those after it.",
                lambda Q, K, s: _hidden(Q, K, s, ~causal(len(Q), len(K))),
            ),
            Mistake(
                "N_k - N has the wrong sign.", lambda Q, K, s: _hidden(Q, K, s, causal(len(Q), len(K), len(Q) - len(K)))
            ),
            Mistake("Nothing is hidden.", lambda Q, K, s: s * (Q @ K.T)),
            Mistake(
                "The scores are not multiplied by scale.", lambda Q, K, s: _hidden(Q, K, 1, causal(len(Q), len(K)))
            ),
            Mistake(
                "A hidden score is 0 here. exp(0) is 1, so that key would count: it must be -∞.",
                lambda Q, K, s: _hidden(Q, K, s, causal(len(Q), len(K)), 0),
            ),
            *(
                Mistake(
                    "A hidden score is a large negative number here, not -∞. A row whose true scores are all below "
                    "it would give the hidden keys all the weight.",
                    lambda Q, K, s, value=value: _hidden(Q, K, s, causal(len(Q), len(K)), value),
                )
                for value in (-1e4, -1e5, -1e6, -1e9, -1e10, -1e30, np.finfo(np.float32).min)
            ),
        ),
        faults={"unwritten": "a hidden score must be stored, too: -∞."},
    ),
    Exercise(
        name="08_skip",
        answer="forward",
        start=("keys = N_k                                               # all of them",),
        outputs=("O",),
        grid=("Br", None),
        inputs=cases(
            16,
            lambda rng, N, N_k: (*qkv(rng, N, N_k, 8), a_scale(rng)),
            {"N": 37, "N_k": 37},
            {"N": 1, "N_k": 1},
            {"N": 21, "N_k": 45},
            {"N": 21, "N_k": 44},
            {"N": 45, "N_k": 21},
            {"N": 32, "N_k": 32},
        ),
        sizes=lambda Q, K, V, scale: {"N": len(Q), "N_k": len(K), "seen": sum(_keys(len(Q), len(K)))},
        bill=(
            Bound("Q", "loads", "N*d", "each row once", "the part outside the hole has changed"),
            *(
                Bound(
                    x,
                    "loads",
                    "seen*d",
                    "what the last query of each tile sees",
                    "keys are loaded that no query of the tile sees: `keys` is too large, or rounded up to whole tiles",
                )
                for x in "KV"
            ),
            Bound("O", "stores", "N*d", "each element once", "the part outside the hole has changed"),
        ),
        share=(Share("HBM", "2*d + 2*N_k", "its rows of Q and O, and 1/Br of each tile of K and V"),),
        hints=(
            "Of all queries of a tile the last one sees the most keys. Which one is that, also where the tile hangs "
            "over the edge?",
            "The tile begins at blockIdx.x * Br, and its last query is blockIdx.x * Br + Br - 1, but no later than N "
            "- 1. Query i sees the keys j ≤ i + N_k - N: how many are that?",
            "last = min(cuda.blockIdx.x * Br + Br, N) - 1, and keys = last + 1 + N_k - N, which may be negative "
            "where N > N_k.",
        ),
        mistakes=(
            Mistake(
                "`keys` is what the first query of the tile sees. Later queries of the tile see more.",
                lambda Q, K, V, s: _skipped(Q, K, V, s, _of_first(len(Q), len(K))),
            ),
            Mistake(
                "N_k - N is missing in `keys`: the last query is aligned with the last key.",
                lambda Q, K, V, s: _skipped(Q, K, V, s, _of_unaligned(len(Q), len(K))),
            ),
            Mistake(
                "`keys` is one too small: query i sees key i, so it is a number of i + 1 keys.",
                lambda Q, K, V, s: _skipped(
                    Q,
                    K,
                    V,
                    s,
                    causal(len(Q), len(K))
                    & (np.arange(len(K)) < np.repeat(np.array(_keys(len(Q), len(K))) - 1, Br)[: len(Q), None]),
                ),
            ),
        ),
        faults={
            "OutOfBounds": "`keys` is larger than N_k: the last tile hangs over the edge, so take min(..., N) for "
            "its last query.",
            "UninitializedRead": "`keys` must be the same for all threads of a block, as they load a tile together: "
            "it depends on the tile, not on the thread's own query.",
            "BarrierDivergence": "`keys` must be the same for all threads of a block, or some miss a barrier: it "
            "depends on the block's tile, not on the thread's own query.",
            "wrong": "compute `keys` by hand for N = N_k = 16: 8 for the first tile of queries, 16 for the second.",
        },
    ),
)
