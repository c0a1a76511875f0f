"""The exercise of lesson 10: tiles that are left out are not loaded."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake, Share, constants
from .common import a_scale, cases, qkv, weights

Br, Bc = constants("10_blocks", "Br", "Bc")


def _inputs(rng, N, N_k, part=0.5):
    shape = -(-N // Br), -(-N_k // Bc)
    mask = (rng.random(shape) < part) * rng.integers(1, 4, shape, np.uint8)  # 0 alone means left out
    if mask.shape[0] > 2:
        mask[1] = 0  # a tile of queries that sees nothing
    return *qkv(rng, N, N_k, 8), mask, a_scale(rng)


def _visited(mask, N_k):
    return int(((mask != 0) * np.minimum(Bc, N_k - np.arange(mask.shape[1]) * Bc)).sum())


def _attend(Q, K, V, mask, scale):
    seen = np.repeat(np.repeat(mask, Br, axis=0), Bc, axis=1)[: len(Q), : len(K)]
    return weights(np.where(seen != 0, scale * (Q @ K.T), np.float32(-np.inf))) @ V


def _up_to_first_zero(mask):
    return np.logical_and.accumulate(mask != 0, axis=1).astype(np.uint8)


EXERCISES = (
    Exercise(
        name="10_blocks",
        answer="forward",
        outputs=("O",),
        grid=("Br", None),
        inputs=cases(
            18,
            _inputs,
            {"N": 37, "N_k": 45},
            {"N": 1, "N_k": 1, "_part": 2},
            {"N": 16, "N_k": 32},
            {"N": 40, "N_k": 10, "_part": 0.7},
        ),
        sizes=lambda Q, K, V, block_mask, scale: {
            "N": len(Q),
            "N_k": len(K),
            "Tr": block_mask.shape[0],
            "Tc": block_mask.shape[1],
            "visited": _visited(block_mask, len(K)),
        },
        bill=(
            Bound("Q", "loads", "N*d", "each row once", "the part outside the hole has changed"),
            *(
                Bound(
                    x,
                    "loads",
                    "visited*d",
                    "the keys of the tiles that are visited",
                    "tiles that the mask leaves out are loaded all the same: ask the mask first; or each thread "
                    "loads the whole tile",
                )
                for x in "KV"
            ),
            Bound(
                "block_mask",
                "loads",
                "Tr*Br*Tc",
                "each of Br threads asks once per tile",
                "the mask is asked more than once per tile",
            ),
            Bound("O", "stores", "N*d", "each element once", "the part outside the hole has changed"),
        ),
        share=(
            Share("HBM", "2*d + Tc + 4*N_k", "its rows of Q and O, the mask, and twice 1/Br of each tile of K and V"),
        ),
        hints=(
            "The mask has an element for each tile. Which row of it belongs to this block, which column to the tile "
            "that begins at key j?",
            "block_mask[cuda.blockIdx.x, j // Bc]. All threads of the block find the same answer there, so all of "
            "them may go on to the next tile (`continue`) without missing a barrier. If they stay, they load: "
            "element e of the tile, for e = r, r + Br, ...",
            "if the mask is 0: continue. for e in range(r, min(Bc, N_k - j) * d, Br): K_j[e // d, e % d] = K[j + e "
            "// d, e % d], and V_j likewise. Then the barrier.",
        ),
        mistakes=(
            Mistake(
                "The mask is not asked: that is attention to all keys.",
                lambda Q, K, V, mask, s: _attend(Q, K, V, np.ones_like(mask), s),
            ),
            Mistake(
                "The tiles that the mask leaves out are visited, and the others left out: 0 means left out.",
                lambda Q, K, V, mask, s: _attend(Q, K, V, mask == 0, s),
            ),
            Mistake(
                "Tiles with 2 in the mask are left out, too: 0 means left out, and nothing else.",
                lambda Q, K, V, mask, s: _attend(Q, K, V, mask == 1, s),
            ),
            Mistake(
                "The loop ends at the first tile that is left out: `continue` goes on to the next, `break` does not.",
                lambda Q, K, V, mask, s: _attend(Q, K, V, _up_to_first_zero(mask), s),
            ),
            Mistake(
                "All tiles of queries ask the first row of the mask.",
                lambda Q, K, V, mask, s: _attend(Q, K, V, np.broadcast_to(mask[:1], mask.shape), s),
            ),
        ),
        faults={
            "OutOfBounds block_mask": "the mask has an element per tile, not per key: its column is j // Bc, its row "
            "the number of the block.",
            "OutOfBounds": "the last tile hangs over the edge: it has min(Bc, N_k - j) keys.",
            "RaceDetected": "a barrier is missing after the loads, or two threads load the same element: thread r "
            "loads the elements r, r + Br, ...",
            "BarrierDivergence": "some threads of the block go on to the next tile and others do not: all must find "
            "the same answer.",
            "UninitializedRead": "an element of K_j or V_j is used that no thread loaded.",
        },
    ),
)
