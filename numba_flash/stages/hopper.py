"""Stage `hopper`: flash2 on the tensor cores of Hopper, after FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).

Deletes waiting. One thread of a block, the producer, has tiles of Q, K and V copied by TMA into rings of slots; two or
three warp groups, the consumers, multiply by wgmma, which takes its operands from shared memory. Tiles are larger, so
that K and V are read less often. For one head, N queries, N_k keys, Tr = ⌈N/Br⌉, without a mask:

    hopper       loads Q Nd, K Tr·N_k·d, V Tr·N_k·d                                 stores O Nd, L N
                 one atomic of `queue` a tile, and one store a launch

Each consumer has 64 rows of the tile. All blocks of keys of all its tiles are one sequence of steps. In step n it

    issues   S = Q_i K_jᵀ  and  O_i += P V_j of the step before,
    waits for S, and takes its exponentials while the tensor cores are busy with O and with the other group,
    waits for O, rescales it, and rounds P to 16 bits: in registers, the left operand of the next step.

The groups take turns to issue. The first step of a tile issues the last product of the tile before. There are as many
blocks as multiprocessors; each takes tiles from a queue until none is left. A tile's blocks run from the last to the
first, so that the blocks that causality cuts come first, and among tiles those with the most blocks come first.

What each barrier waits for, in each of its phases:

    Q full, K full, V full   1 arrival, the producer's, and the bytes of the tile
    Q empty                  4 arrivals a consumer: of a lane of each warp, since each warp reads which tile it is, too
    K empty, V empty         1 arrival a consumer: of its thread 0, once S, or O, has been waited for by the group
    turn of consumer g       256 threads: its own 128, which wait, and the 128 of the group before, which do not

The queue is one counter a launch, of many: launches that run at the same time use different ones, on whatever streams
they are, and the last block to take a tile sets the counter back to zero. A memset for each launch would be a second
command on the stream, some microseconds; a fixed schedule needs no counter, but cannot even out blocks that run late.
"""

import itertools
import math
from functools import cache
from typing import NamedTuple

import numpy as np

from ..blocks import tiles
from ..engine.launch import device_name, empty, launch, to_device
from ..errors import Unsupported
from ..masks import no_mask

KINDS = {np.dtype(np.float16): "f16", np.dtype("V2"): "bf16"}  # NumPy has no bfloat16: two bytes without a meaning
COUNTERS = 65536                                             # of the queue: more launches than the driver lets wait
SCALES = 1e-6, 1e6                                           # where −10³⁰ · scale is neither a score nor infinite


class Ring(NamedTuple):
    """Slots in a block's shared memory, for tiles that arrive one after another; in bytes from its start."""

    slots: int
    first: int                                               # where slot 0 is
    size: int                                                # of a slot, and the bytes that its `full` waits for
    full: int                                                # slot 0's barrier, of 1 arrival: the producer's
    empty: int                                               # slot 0's barrier, of `readers` arrivals
    readers: int


class Plan(NamedTuple):
    """How a block shares its work, registers and shared memory."""

    d: int
    consumers: int                                           # warp groups, of 64 rows each; one more is the producer's
    Br: int
    Bc: int
    threads: int
    registers: tuple                                         # of a consumer's and of a producer's thread
    Q: Ring
    K: Ring
    V: Ring
    O: int                                                   # where the warps' rows of O are, 16 each
    shared_bytes: int
    turns: bool                                              # the consumers take turns to issue their products
    lazy: bool                                               # O is rescaled when a maximum has grown by more than 2⁸
    cut: int                                                 # groups of 8 columns exponentiated before the wait for O


@cache
def make_plan(d, simple=False):
    """The Plan for heads of d = 64 or 128. simple: no turns, and every exponential after the wait for O.

    d = 64 has registers for a third consumer: 160 for each thread, where d = 128 needs 232.
    """
    consumers, slots, registers = (3, 4, (160, 32)) if d == 64 else (2, 2, (232, 40))
    Br, Bc = 64 * consumers, 128
    readers = {"Q": 4 * consumers, "K": consumers, "V": consumers}  # Q: each warp, which reads which tile it is, too
    slots = {"Q": 2, "K": slots, "V": slots}
    size = {"Q": Br * d * 2, "K": Bc * d * 2, "V": Bc * d * 2}
    end = list(itertools.accumulate((slots[x] * size[x] for x in "QKV"), initial=0))
    barriers = end[3] + Br * d * 2                           # behind O, which is as large as a tile of Q
    rings = []
    for first, x in zip(end, "QKV"):
        rings.append(Ring(slots[x], first, size[x], barriers, barriers + 8 * slots[x], readers[x]))
        barriers += 16 * slots[x]
    aligned = barriers + 1024                                # swizzled tiles begin at a multiple of 1024 bytes
    cut = 0 if simple else 8 if d == 128 else 16
    threads = 128 * (consumers + 1)
    return Plan(d, consumers, Br, Bc, threads, registers, *rings, end[3], aligned, not simple, True, cut)


def heads_together(N_k, d, share, causal):
    """How many heads' tiles are handed out together, the longest first: as many as have K and V in 20 MiB of L2.

    share: heads of Q for one of K. Tiles of equal length need no order.
    """
    return max(1, 20 * 2**20 // (4 * N_k * d)) * share if causal else 1


@cache
def _queue():
    return to_device(np.zeros(COUNTERS, np.int32), "gpu")


_launches = itertools.count()


def forward(Q, K, V, scale, *, mask=None, blocks=None, return_lse=False, device=None, plan=None):
    """Q (H, N, d), K and V (G, N_k, d) on the device, float16 or bfloat16 -> O (H, N, d) and L (H, N) float32.

    N > 0, d = 64 or 128, H a multiple of G. bfloat16 has the dtype "V2". blocks: (192, 128) for d = 64, (128, 128) for
    d = 128, or None. plan: another one than make_plan(d). |scale · S| must stay below 5·10²⁹. Raises Unsupported for a
    GPU other than of compute capability 9.0, and for dropout and block masks, ValueError for another d, dtype or tile.
    """
    check(Q, mask, blocks, device)
    from ..ptx.tensor_map import copied_if_unaligned, tensor_maps
    from .hopper_kernels import make_forward

    (H, N, d), (G, N_k, _) = Q.shape, K.shape
    plan, mask = plan or make_plan(d), mask or no_mask(device)
    if N_k == 0:
        zero = to_device(np.zeros((H, N, d), np.float16), device)
        return zero.view(Q.dtype), to_device(np.full((H, N), -math.inf, np.float32), device)
    O, L = empty((H, N, d), np.float16, device), empty((H, N), np.float32, device)
    Q, K, V = (copied_if_unaligned(x) for x in (Q, K, V))
    maps = tensor_maps(KINDS[Q.dtype], (Q, plan.Br), (K, plan.Bc), (V, plan.Bc), (O, 16))
    every = mask.masked or (mask.causal and (plan.Bc % plan.Br != 0 or (N_k - N) % plan.Bc != 0))
    scaled = not SCALES[0] <= scale <= SCALES[1]             # negative ones and 0, too
    kernel = make_forward(plan, KINDS[Q.dtype], mask.causal, mask.masked, every, scaled)
    words = [x.view(np.uint16) for x in (Q, K, V, O)]
    together = heads_together(N_k, d, H // G, mask.causal)
    turn = next(_launches) % COUNTERS
    factor = np.float32(scale * math.log2(math.e))
    arguments = *words[:3], mask.keys, maps, words[3], L, _queue(), turn, together, factor
    grid = min(multiprocessors(), tiles(N, plan.Br) * H)
    launch(kernel, grid, plan.threads, *arguments, shared_bytes=plan.shared_bytes, device=device)
    return O.view(Q.dtype), L


def multiprocessors():
    from numba import cuda

    return cuda.get_current_device().MULTIPROCESSOR_COUNT


def check(Q, mask, blocks, device):
    """Raise for what this stage does not do."""
    name = device_name(device)
    if name != "gpu":
        raise Unsupported(f"stage 'hopper' runs on a GPU of compute capability 9.0 (H100, H200), not on {name!r}")
    from ..engine.gpu import limits

    gpu = limits()
    if gpu.compute_capability != (9, 0):
        capability = ".".join(map(str, gpu.compute_capability))
        raise Unsupported(f"stage 'hopper' needs compute capability 9.0 (H100, H200); {gpu.name} has {capability}")
    if Q.dtype not in KINDS:
        raise ValueError(f"stage 'hopper' takes float16 and bfloat16, not {Q.dtype}: convert q, k and v")
    if Q.shape[2] not in (64, 128):
        raise ValueError(f"stage 'hopper' takes heads of d = 64 or 128, not {Q.shape[2]}")
    plan = make_plan(Q.shape[2])
    if blocks is not None and tuple(blocks) != (plan.Br, plan.Bc):
        raise ValueError(f"blocks={blocks!r}: stage 'hopper' has one tile for d = {plan.d}, {(plan.Br, plan.Bc)}")
    if mask is not None and (mask.drops or mask.sides):
        raise Unsupported("stage 'hopper' has no dropout and no block mask: use stage='flash2'")
