"""The kernel of stage `hopper`; hopper.py says what it does, and launches it."""

import math
from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ..ptx import mbarrier, registers, ring, tma, wgmma
from ..ptx.inline import device, shared_address
from ..ptx.numbers import ex2, lg2, make_pack
from ..ptx.stmatrix import stmatrix_x4

ALL = 0xFFFFFFFF                                             # the lanes of a warp
NEVER = -1e30                                                # an unseen key's score: fastmath has no −∞
LEAST = -5e29                                                # the first maximum: without keys, P = 0 and l = 0


@cache
def make_softmax(Bc, scaled, lazy):
    """What a thread does with its scores: S[4c + 2r + e] is in row r of two, column e of two of group c."""
    GROUPS = Bc // 8
    SCORES = Bc // 2

    @device
    def raise_maxima(S, m, old, scale):
        """m: each row's maximum, this block included. old: the factors for what was summed under the ones before."""
        m_new = cuda.local.array(2, float32)
        for r in range(2):
            m_new[r] = m[r]
            for c in range(GROUPS):
                m_new[r] = max(m_new[r], max(S[4 * c + 2 * r], S[4 * c + 2 * r + 1]))
            m_new[r] = max(m_new[r], cuda.shfl_xor_sync(ALL, m_new[r], 1))  # four lanes share a row
            m_new[r] = max(m_new[r], cuda.shfl_xor_sync(ALL, m_new[r], 2))
        if lazy:                                             # a maximum that is too small by 2⁸ at most does no harm
            grown = max(m_new[0] - m[0], m_new[1] - m[1]) * scale > float32(8)
            if not cuda.any_sync(ALL, grown):
                m_new[0] = m[0]
                m_new[1] = m[1]
        for r in range(2):
            old[r] = ex2((m[r] - m_new[r]) * scale)
            m[r] = m_new[r]

    @device
    def exponentials(S, m, l, scale, first, last):
        """In place, P = 2^((S − m) · scale) for the groups of columns from `first` to `last`; l grows by their sums."""
        for c in range(first, last):
            for r in range(2):
                below = m[r] * scale
                p0 = ex2(S[4 * c + 2 * r] * scale - below)
                p1 = ex2(S[4 * c + 2 * r + 1] * scale - below)
                l[r] = l[r] + p0 + p1
                S[4 * c + 2 * r] = p0
                S[4 * c + 2 * r + 1] = p1

    @device
    def scale_first(S, scale):
        """Where `scaled`, S becomes scale · S; elsewhere the exponential scales, at no cost."""
        if scaled:
            for x in range(SCORES):
                S[x] *= scale

    return raise_maxima, exponentials, scale_first


@cache
def make_hide(Bc, causal, masked):
    """hide(S, mask, b, j, row, lane, N, N_k): what the warp's rows from `row` on do not see of block j is NEVER."""
    GROUPS = Bc // 8
    WORDS = Bc // 32

    @device
    def hide(S, mask, b, j, row, lane, N, N_k):
        seen_by_all = int32(min(N_k, row + 1 + N_k - N)) if causal else N_k
        first = j * Bc + 2 * (lane % 4)                      # this thread's first column
        if int32((j + 1) * Bc) > seen_by_all:
            for r in range(2):
                i = int32(row + lane // 4 + 8 * r)
                seen = min(N_k, i + 1 + N_k - N) if causal else N_k
                left = int32(seen - first)
                for c in range(GROUPS):
                    for e in range(2):
                        if 8 * c + e >= left:
                            S[4 * c + 2 * r + e] = float32(NEVER)
        if masked:
            for w in range(WORDS):                           # each lane asks for one key of 32
                key = j * Bc + 32 * w + lane
                bits = uint32(cuda.ballot_sync(ALL, key < N_k and mask[b, key] != 0)) >> uint32(2 * (lane % 4))
                for c in range(4):
                    for e in range(2):
                        if not bits >> uint32(8 * c + e) & uint32(1):
                            S[4 * (4 * w + c) + e] = float32(NEVER)
                            S[4 * (4 * w + c) + 2 + e] = float32(NEVER)

    return hide


@cache
def make_finish(d, dtype):
    """finish(…): what a warp has of a tile leaves: O_i / l through its own 16 rows of shared memory, and L."""
    PANELS = d // 64
    PANEL = 16 * 128
    LN2 = math.log(2)
    pack = make_pack(dtype)
    store_O = tma.make_store(16)

    @device
    def finish(O_i, m, l, O, L, O_map, h, row, N, rows, scale):
        lane = registers.lane_now()
        share = cuda.local.array(2, float32)
        for r in range(2):
            l[r] += cuda.shfl_xor_sync(ALL, l[r], 1)
            l[r] += cuda.shfl_xor_sync(ALL, l[r], 2)
            share[r] = float32(1) / l[r] if l[r] > float32(0) else float32(0)
        if lane == 0:
            tma.wait_read()                                  # the store of the tile before has read these rows
        cuda.syncwarp()
        for c in range(0, d // 8, 2):                        # two groups of 8 columns, rows 0 to 7 and 8 to 15 of each
            piece = (c + lane // 16) % 8 ^ lane % 8
            stmatrix_x4(
                rows + c // 8 * PANEL + lane % 16 * 128 + piece * 16,
                pack(O_i[4 * c] * share[0], O_i[4 * c + 1] * share[0]),
                pack(O_i[4 * c + 2] * share[1], O_i[4 * c + 3] * share[1]),
                pack(O_i[4 * c + 4] * share[0], O_i[4 * c + 5] * share[0]),
                pack(O_i[4 * c + 6] * share[1], O_i[4 * c + 7] * share[1]),
            )
        tma.fence_async()
        cuda.syncwarp()                                      # all rows are written
        if lane == 0:
            for panel in range(PANELS):
                store_O(O, O_map, 64 * panel, row, h, rows + panel * PANEL)
            tma.commit()
        if lane % 4 == 0:
            for r in range(2):
                i = row + lane // 4 + 8 * r
                if i < N:
                    L[h, i] = (m[r] * scale + lg2(l[r])) * float32(LN2)

    return finish


@cache
def make_blocks(Br, Bc, causal):
    """blocks(i, N, N_k): blocks of keys that the tile from query i on visits; 1 where it sees none: a step."""

    @device
    def blocks(i, N, N_k):
        seen = min(N_k, i + Br + N_k - N) if causal else N_k
        return int32(max(1, (seen + Bc - 1) // Bc))

    return blocks


@cache
def make_produce(plan, causal):
    """produce(…): one thread takes tiles from the queue, and has Q_i and then all its K_j and V_j loaded."""
    Br, Bc = plan.Br, plan.Bc
    PANELS = plan.d // 64
    PANEL_Q, PANEL_K = Br * 128, Bc * 128
    QS, KS, VS = plan.Q, plan.K, plan.V
    load_Q, load_K = tma.make_load(Br), tma.make_load(Bc)
    blocks = make_blocks(Br, Bc, causal)

    @device
    def produce(start, taken, Q, K, V, maps, queue, launch, together):
        N, N_k = int32(Q.shape[1]), int32(K.shape[1])
        H, Tr = uint32(Q.shape[0]), uint32((Q.shape[1] + Br - 1) // Br)
        together = uint32(together)
        tile = uint32(cuda.blockIdx.x)                       # the first one needs no queue
        t, n = uint32(0), uint32(0)                          # tiles of Q, blocks of K so far
        while True:
            ring.wait_empty(start, QS, t)
            if tile >= uint32(Tr * H):
                taken[t % QS.slots, 0] = N                   # there is no such tile: the consumers stop
                mbarrier.arrive(ring.full(start, QS, t))
                break
            group = uint32(tile // uint32(together * Tr) * together)  # heads whose K and V fit into L2 together:
            heads = min(together, uint32(H - group))         # of these, the longest tiles first
            place = uint32(tile - group * Tr)
            i = int32((Tr - 1 - place // heads) * Br)
            h = uint32(group + place % heads)
            g = h // uint32(H // uint32(K.shape[0]))
            taken[t % QS.slots, 0] = i
            taken[t % QS.slots, 1] = h
            ring.expect(start, QS, t)
            for panel in range(PANELS):
                address = ring.slot(start, QS, t) + panel * PANEL_Q
                load_Q(Q, maps[0], 64 * panel, i, h, address, ring.full(start, QS, t))
            j = blocks(i, N, N_k)
            while j > 0:                                     # from the last block, which may need a mask, to the first
                j = int32(j - 1)
                ring.wait_empty(start, KS, n)
                ring.expect(start, KS, n)
                for panel in range(PANELS):
                    address = ring.slot(start, KS, n) + panel * PANEL_K
                    load_K(K, maps[1], 64 * panel, j * Bc, g, address, ring.full(start, KS, n))
                ring.wait_empty(start, VS, n)
                ring.expect(start, VS, n)
                for panel in range(PANELS):
                    address = ring.slot(start, VS, n) + panel * PANEL_K
                    load_K(V, maps[2], 64 * panel, j * Bc, g, address, ring.full(start, VS, n))
                n = uint32(n + 1)
            t = uint32(t + 1)
            before = cuda.atomic.add(queue, launch, 1)
            if before == int32(Tr * H - 1):
                queue[launch] = 0                            # as it was: nobody takes another one in this launch
            tile = uint32(cuda.gridDim.x + before)

    return produce


@cache
def make_consume(plan, dtype, causal, masked, hide_all, scaled):
    """consume(…): one warp group computes 64 rows of each tile that the block takes."""
    d, Br, Bc, CONSUMERS = plan.d, plan.Br, plan.Bc, plan.consumers
    CUT, TURNS, LAZY = plan.cut, plan.turns, plan.lazy
    QS, KS, VS = plan.Q, plan.K, plan.V
    SCORES, WORDS, OUTPUTS, GROUPS = Bc // 2, Bc // 4, d // 2, Bc // 8
    ROWS_O = plan.O
    BYTES_O = 16 * d * 2
    steps = [(k // 4, k % 4 * 32) for k in range(d // 16)]   # a step of 16 columns: its panel, and its bytes there
    Q_steps = tuple(panel * Br * 128 + bytes for panel, bytes in steps)
    K_steps = tuple(panel * Bc * 128 + bytes for panel, bytes in steps)
    V_steps = tuple(k * 16 * 128 for k in range(Bc // 16))
    multiply_QK = wgmma.make_product(Bc, dtype, Q_steps, K_steps, clear=True)
    multiply_PV = wgmma.make_product(d, dtype, None, V_steps, transposed=True)
    DESCRIPTOR_K = wgmma.descriptor()
    DESCRIPTOR_V = wgmma.descriptor(panel=Bc * 128)
    wait_S_alone, wait_S = wgmma.make_wait(SCORES, 0), wgmma.make_wait(SCORES, 1)
    wait_O_alone, wait_O = wgmma.make_wait(OUTPUTS, 0), wgmma.make_wait_after(OUTPUTS, 0)
    raise_maxima, exponentials, scale_first = make_softmax(Bc, scaled, plan.lazy)
    hide = make_hide(Bc, causal, masked)
    finish = make_finish(d, dtype)
    blocks = make_blocks(Br, Bc, causal)
    pack = make_pack(dtype)

    @device
    def describe(kind, address):
        return int64(kind) | int64(uint32(address) >> uint32(4))

    @device
    def products(S, O_i, P, Q_i, start, n, g, thread):
        """Issue S = Q_i K_jᵀ of step n and O_i += P V_j of the step before; wait for S."""
        ring.wait_full(start, KS, n)
        if TURNS:
            mbarrier.sync_named(1 + g, 256)                  # 128 wait, and the 128 of the group before arrive
        multiply_QK(S, Q_i, describe(DESCRIPTOR_K, ring.slot(start, KS, n)))
        ring.wait_full(start, VS, uint32(n - 1))
        multiply_PV(O_i, P, describe(DESCRIPTOR_V, ring.slot(start, VS, uint32(n - 1))))
        if TURNS:
            mbarrier.arrive_named(1 + (g + 1) % CONSUMERS, 256)
        wait_S(S)
        if thread == 0:
            ring.release(start, KS, n)

    @device
    def next_tile(start, taken, t, g, warp, N, N_k):
        """Waits for tile t of Q -> its first query, its head, this warp's first query, blocks of keys, Q_i."""
        ring.wait_full(start, QS, t)
        i, h = taken[t % QS.slots, 0], taken[t % QS.slots, 1]
        Q_i = describe(DESCRIPTOR_K, ring.slot(start, QS, t) + g * 64 * 128)
        return i, h, int32(i + 64 * g + 16 * warp), blocks(i, N, N_k), Q_i

    @device
    def begin(m, l):
        for r in range(2):
            m[r] = float32(LEAST)
            l[r] = float32(0)

    @device
    def copy(m, l, m_done, l_done):
        for r in range(2):
            m_done[r] = m[r]
            l_done[r] = l[r]

    @device
    def clear(O_i):
        for x in range(OUTPUTS):
            O_i[x] = float32(0)

    @device
    def rescale(O_i, old):
        if not LAZY or cuda.any_sync(ALL, min(old[0], old[1]) < float32(1)):
            for x in range(OUTPUTS):
                O_i[x] *= old[x // 2 % 2]

    @device
    def round_P(S, P):
        for x in range(WORDS):
            P[x] = pack(S[2 * x], S[2 * x + 1])

    @device
    def consume(start, taken, g, mask, maps, O, L, N_k, scale_log2):
        thread = cuda.threadIdx.x % 128
        warp = cuda.shfl_sync(ALL, thread // 32, 0)          # one value for all lanes, and the compiler knows it
        lane = thread % 32
        S = cuda.local.array(SCORES, float32)
        P = cuda.local.array(WORDS, uint32)
        O_i = cuda.local.array(OUTPUTS, float32)
        m = cuda.local.array(2, float32)                     # of this thread's two rows
        l = cuda.local.array(2, float32)
        old = cuda.local.array(2, float32)
        m_done = cuda.local.array(2, float32)                # of the tile before, while its last product runs
        l_done = cuda.local.array(2, float32)
        N = int32(O.shape[1])
        sharing = O.shape[0] // mask.shape[0]                # heads with one key mask
        scale = float32(1) if scaled else scale_log2
        rows_O = start + ROWS_O + (4 * g + warp) * BYTES_O
        for x in range(SCORES):
            S[x] = float32(0)
        clear(O_i)
        if TURNS and g == CONSUMERS - 1:
            mbarrier.arrive_named(1, 256)                    # the first turn is the first group's
        t, n = uint32(0), uint32(0)                          # tiles of Q, blocks of K so far
        i, h, row, j, Q_i = next_tile(start, taken, t, g, warp, N, N_k)
        j = int32(j - 1)
        ring.wait_full(start, KS, n)                         # step 0: S and its softmax alone
        multiply_QK(S, Q_i, describe(DESCRIPTOR_K, ring.slot(start, KS, n)))
        wait_S_alone(S)
        if thread == 0:
            ring.release(start, KS, n)
        begin(m, l)
        scale_first(S, scale_log2)
        hide(S, mask, h // sharing, j, row, lane, N, N_k)
        raise_maxima(S, m, old, scale)
        exponentials(S, m, l, scale, 0, GROUPS)
        round_P(S, P)
        while True:
            new = j == 0                                     # S of this step is of the next tile
            h_done, row_done = h, row
            copy(m, l, m_done, l_done)
            if new:
                if lane == 0:
                    ring.release(start, QS, t)
                t = uint32(t + 1)
                i, h, row, j, Q_i = next_tile(start, taken, t, g, warp, N, N_k)
                if i >= N:                                   # there is none
                    break
                begin(m, l)
            j, n = int32(j - 1), uint32(n + 1)
            products(S, O_i, P, Q_i, start, n, g, thread)    # Alg. 1, l. 8, and l. 10 of the block before
            scale_first(S, scale_log2)
            if new or hide_all:
                hide(S, mask, h // sharing, j, row, lane, N, N_k)
            raise_maxima(S, m, old, scale)                   # Alg. 1, l. 9
            for r in range(2):
                l[r] *= old[r]
            exponentials(S, m, l, scale, 0, CUT)             # the tensor cores are still busy with O
            wait_O(O_i, l[0], l[1])
            if thread == 0:
                ring.release(start, VS, uint32(n - 1))
            if new:
                finish(O_i, m_done, l_done, O, L, maps[3], h_done, row_done, N, rows_O, scale)
                clear(O_i)
            rescale(O_i, old)                                # Alg. 1, l. 10
            exponentials(S, m, l, scale, CUT, GROUPS)
            round_P(S, P)
        ring.wait_full(start, VS, n)                         # the last block's P V
        multiply_PV(O_i, P, describe(DESCRIPTOR_V, ring.slot(start, VS, n)))
        wait_O_alone(O_i)
        finish(O_i, m_done, l_done, O, L, maps[3], h_done, row_done, N, rows_O, scale)
        if lane == 0:
            tma.wait_done()                                  # shared memory must outlive the stores

    return consume


@cache
def make_forward(plan, dtype, causal, masked, hide_all, scaled):
    """The kernel: one block a multiprocessor, which lives as long as the launch."""
    QS, KS, VS = plan.Q, plan.K, plan.V
    TAKEN = (QS.slots, 2)
    THREADS = plan.threads
    raise_limit = registers.make_raise(plan.registers[0])
    lower_limit = registers.make_lower(plan.registers[1])
    produce = make_produce(plan, causal)
    consume = make_consume(plan, dtype, causal, masked, hide_all, scaled)

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, 1))
    def hopper(Q, K, V, mask, maps, O, L, queue, launch, together, scale_log2):
        shared = cuda.shared.array(0, np.uint8)
        taken = cuda.shared.array(TAKEN, int32)              # first query and head of the tile in each slot of Q
        start = uint32(shared_address(shared) + 1023) & uint32(-1024)
        group = cuda.threadIdx.x // 128
        if cuda.threadIdx.x == 0:
            ring.new(start, QS)
            ring.new(start, KS)
            ring.new(start, VS)
            mbarrier.fence_init()
            for x in range(4):
                tma.fence_map(maps[x])
        cuda.syncthreads()                                   # the barriers are there
        if group == 0:
            lower_limit()
            if cuda.threadIdx.x == 0:
                produce(start, taken, Q, K, V, maps, queue, launch, together)
        else:
            raise_limit()
            consume(start, taken, cuda.shfl_sync(ALL, group - 1, 0), mask, maps, O, L, int32(K.shape[1]), scale_log2)

    return hopper
