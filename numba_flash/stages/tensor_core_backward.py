"""Backward pass of stage `tensor_core`: flash2's two kernels, each owner of its result, with products on tensor cores.

The kernel that owns keys works with Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, so that Pᵀ and dSᵀ are, as they come out of a product,
what dV += Pᵀ dO and dK += dSᵀ Q want as operands: no tile of results passes through shared memory. The next tile comes
by cp.async while this one is multiplied. There are no atomics, and the same bits come out of every run. For one head, N
queries, N_k keys, Tr = ⌈N/Br⌉ and Tc = ⌈N_k/Bc⌉, each of its own kernel's tiles:

    rowsum         loads dO Nd, O Nd                                              stores D N
    backward_dKdV  loads K N_k·d, V N_k·d, Q TcNd, dO TcNd, L TcN, D TcN          stores dK N_k·d, dV N_k·d
    backward_dQ    loads Q Nd, dO Nd, L 4N, D 4N, K Tr·N_k·d, V Tr·N_k·d          stores dQ Nd

L and D of a query are loaded by each of the four threads that share its row. As operands, P and dS are rounded to
float16 or bfloat16; S, dP, L, D and the sums are float32.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, uint16

from ..blocks import tiles
from ..engine.launch import empty, launch
from ..masks import make_allowed, no_mask
from . import launch_if_any
from .tensor_core import WARPS, empty_like, forward, kind_of, make_masking

KEYS_OWNED = {64: (64, 64), 128: (64, 64)}  # d -> (Br, Bc) of backward_dKdV, whose blocks own Bc keys
QUERIES_OWNED = {64: (128, 64), 128: (128, 32)}  # d -> (Br, Bc) of backward_dQ, whose blocks own Br queries


def bytes_dKdV(Br, Bc, d):
    """Shared memory: K_j and V_j, and twice (one comes while the other is used) Q_i, dO_i, L_i and D_i."""
    return 2 * Bc * d * 2 + 2 * (2 * Br * d * 2 + 2 * Br * 4)


def bytes_dQ(Br, Bc, d):
    """Shared memory: Q_i and dO_i, and twice K_j and V_j."""
    return 2 * Br * d * 2 + 2 * 2 * Bc * d * 2


@cache
def make_rowsum(kind, d):
    """D = rowsum(dO ∘ O): d/8 threads a row, 8 elements a thread."""
    from ..ptx.copies import ELEMENTS, load_16
    from ..ptx.numbers import make_unpack

    unpack = make_unpack(kind)
    SHARERS = d // ELEMENTS
    ROWS = 32 * WARPS // SHARERS                             # of a block

    @cuda.jit
    def rowsum(dO, O, D):
        h = cuda.blockIdx.y
        part = cuda.threadIdx.x % SHARERS
        i = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // SHARERS
        D_i = float32(0)
        if i < D.shape[1]:
            dO_i, O_i = load_16(dO, h, i, part * ELEMENTS), load_16(O, h, i, part * ELEMENTS)
            for t in range(4):
                x, y = unpack(dO_i[t]), unpack(O_i[t])
                D_i += x[0] * y[0] + x[1] * y[1]
        lanes = SHARERS // 2
        while lanes > 0:
            D_i += cuda.shfl_xor_sync(0xFFFFFFFF, D_i, lanes)
            lanes //= 2
        if part == 0 and i < D.shape[1]:
            D[h, i] = D_i                                    # Alg. 2, l. 4

    return rowsum, ROWS


@cache
def make_dKdV(Br, Bc, d, kind, masked, first_query):
    """One tile of keys a block; each warp has 16·ROWS rows of Sᵀ, dK_j and dV_j."""
    from ..ptx.copies import cp_async_commit, cp_async_wait, load_shared_floats
    from ..ptx.inline import device, shared_address
    from ..ptx.numbers import exp
    from ..ptx.tiles import clear, clear_row, column_of, load_row, make_load_tile, make_products, make_store_row, row_of

    ROWS, QUERIES, COLUMNS = Bc // (16 * WARPS), Br // 8, d // 8
    K_BYTES, Q_BYTES, L_BYTES = 2 * Bc * d, 2 * Br * d, 4 * Br
    STEP = 2 * (Q_BYTES + L_BYTES)                           # bytes of Q_i, dO_i, L_i and D_i
    load_K, load_Q = make_load_tile(Bc, d, 32 * WARPS), make_load_tile(Br, d, 32 * WARPS)
    rows_by_rows, rows_by_columns = make_products(kind, ROWS, Br, d)
    store_row, key_allowed = make_store_row(kind, d), make_allowed(0, masked)

    @device
    def load_step(Q_i, Q, dO, L, D, h, i):
        """Begin to copy what belongs to a tile of queries, one after the other."""
        N = Q.shape[1]
        load_Q(Q_i, Q, h, i, N)                              # Alg. 2, l. 9
        load_Q(Q_i + Q_BYTES, dO, h, i, N)
        load_row(Q_i + 2 * Q_BYTES, L, h, i, N, Br)
        load_row(Q_i + 2 * Q_BYTES + L_BYTES, D, h, i, N, Br)
        cp_async_commit()

    @device
    def mask_tile(P_T, c, i, shift):
        """0 for the queries i, … that come before the first to see key c, …; shift: N − N_k."""
        for u in range(ROWS):
            for r in range(2):
                row = c + 16 * u + row_of(cuda.laneid, 2 * r)
                hidden = int32(first_query(row + shift - i)) - int32(column_of(cuda.laneid, 0))  # of this tile
                for n in range(QUERIES):
                    for e in range(2):
                        if 8 * n + e < hidden:
                            P_T[u, n, 2 * r + e] = 0

    @device
    def weights(S_T, L_i, scale):
        """S_T becomes P_T."""
        for n in range(QUERIES):
            L_n = load_shared_floats(L_i + 4 * column_of(cuda.laneid, 0), 32 * n)
            for u in range(ROWS):
                for e in range(4):
                    S_T[u, n, e] = exp(S_T[u, n, e] * scale - L_n[e % 2])

    @device
    def gradient(dP_T, P_T, D_i):
        """dP_T becomes dS_T."""
        for n in range(QUERIES):
            D_n = load_shared_floats(D_i + 4 * column_of(cuda.laneid, 0), 32 * n)
            for u in range(ROWS):
                for e in range(4):
                    dP_T[u, n, e] = P_T[u, n, e] * (dP_T[u, n, e] - D_n[e % 2])

    @cuda.jit(launch_bounds=32 * WARPS)
    def backward_dKdV(Q, K, V, mask, dO, L, D, dK, dV, scale):
        K_j = shared_address(cuda.shared.array(0, uint16))
        V_j = K_j + K_BYTES
        steps = V_j + K_BYTES                                # where two tiles of Q, dO, L and D lie
        S_T = cuda.local.array((ROWS, QUERIES, 4), float32)  # what this thread has of the tiles of results
        dP_T = cuda.local.array((ROWS, QUERIES, 4), float32)
        dK_j = cuda.local.array((ROWS, COLUMNS, 4), float32)
        dV_j = cuda.local.array((ROWS, COLUMNS, 4), float32)
        g = cuda.blockIdx.y
        group = Q.shape[0] // K.shape[0]
        N, N_k = Q.shape[1], K.shape[1]
        j = cuda.blockIdx.x * Bc                             # Alg. 2, l. 5
        first = cuda.threadIdx.x // 32 * 16 * ROWS           # of the rows of this warp
        start = first_query(j + N - N_k)
        load_K(K_j, K, g, j, N_k)                            # Alg. 2, l. 6
        load_K(V_j, V, g, j, N_k)
        load_step(steps, Q, dO, L, D, g * group, start)
        clear(dK_j)                                          # Alg. 2, l. 7
        clear(dV_j)
        Q_i, Q_next = steps, steps + STEP
        for h in range(g * group, (g + 1) * group):
            for i in range(start, N, Br):                    # Alg. 2, l. 8
                cp_async_wait(0)
                cuda.syncthreads()                           # Q_i is complete, nobody still reads what was before
                h_next, i_next = (h, i + Br) if i + Br < N else (h + 1, start)
                load_step(Q_next, Q, dO, L, D, h_next, i_next if h_next < (g + 1) * group else N)  # the last: nothing
                clear(S_T)
                rows_by_rows(S_T, K_j, first, Q_i)           # Alg. 2, l. 10
                weights(S_T, Q_i + 2 * Q_BYTES, scale)       # Alg. 2, l. 11
                if first_query(j + Bc - 1 + N - N_k) > i:
                    mask_tile(S_T, j + first, i, N - N_k)
                rows_by_columns(dV_j, S_T, Q_i + Q_BYTES)    # Alg. 2, l. 12
                clear(dP_T)
                rows_by_rows(dP_T, V_j, first, Q_i + Q_BYTES)  # Alg. 2, l. 13
                gradient(dP_T, S_T, Q_i + 2 * Q_BYTES + L_BYTES)  # Alg. 2, l. 14
                rows_by_columns(dK_j, dP_T, Q_i)             # Alg. 2, l. 16
                Q_i, Q_next = Q_next, Q_i
        cp_async_wait(0)                                     # nothing arrives after the block has gone
        b = g * mask.shape[0] // K.shape[0]
        for u in range(ROWS):
            for r in range(2):
                c = j + first + 16 * u + row_of(cuda.laneid, 2 * r)
                if c < N_k:
                    if not key_allowed(mask, b, 0, c):       # no L holds this key: what was summed is no weight
                        clear_row(dK_j, u, r)
                        clear_row(dV_j, u, r)
                    store_row(dK, g, c, dK_j, u, r, scale)   # Alg. 2, l. 18
                    store_row(dV, g, c, dV_j, u, r, float32(1))

    return backward_dKdV


@cache
def make_dQ(Br, Bc, d, kind, masked, seen):
    """One tile of queries a block; each warp has 16·ROWS rows of S and dQ_i."""
    from ..ptx.copies import cp_async_commit, cp_async_wait
    from ..ptx.inline import device, shared_address
    from ..ptx.numbers import exp
    from ..ptx.tiles import clear, make_load_tile, make_products, make_store_row, row_of

    ROWS, KEYS, COLUMNS = Br // (16 * WARPS), Bc // 8, d // 8
    Q_BYTES, K_BYTES = 2 * Br * d, 2 * Bc * d
    load_Q, load_K = make_load_tile(Br, d, 32 * WARPS), make_load_tile(Bc, d, 32 * WARPS)
    rows_by_rows, rows_by_columns = make_products(kind, ROWS, Bc, d)
    store_row, (is_whole, mask_tile) = make_store_row(kind, d), make_masking(ROWS, Bc, masked, seen)

    @device
    def weights(S_ij, L_i, scale):
        """S_ij becomes P_ij."""
        for u in range(ROWS):
            for n in range(KEYS):
                for e in range(4):
                    S_ij[u, n, e] = exp(S_ij[u, n, e] * scale - L_i[u, e // 2])

    @device
    def gradient(dP_ij, P_ij, D_i):
        """dP_ij becomes dS_ij."""
        for u in range(ROWS):
            for n in range(KEYS):
                for e in range(4):
                    dP_ij[u, n, e] = P_ij[u, n, e] * (dP_ij[u, n, e] - D_i[u, e // 2])

    @cuda.jit(launch_bounds=32 * WARPS)
    def backward_dQ(Q, K, V, mask, dO, L, D, dQ, scale):
        Q_i = shared_address(cuda.shared.array(0, uint16))
        dO_i = Q_i + Q_BYTES
        K_j = dO_i + Q_BYTES                                 # V_j follows it
        K_next = K_j + 2 * K_BYTES
        S_ij = cuda.local.array((ROWS, KEYS, 4), float32)
        dP_ij = cuda.local.array((ROWS, KEYS, 4), float32)
        dQ_i = cuda.local.array((ROWS, COLUMNS, 4), float32)
        L_i = cuda.local.array((ROWS, 2), float32)
        D_i = cuda.local.array((ROWS, 2), float32)
        h = cuda.blockIdx.y
        g = h * K.shape[0] // Q.shape[0]
        b = h * mask.shape[0] // Q.shape[0]
        N, N_k = Q.shape[1], K.shape[1]
        i = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * Br      # with causal order the longest first
        keys = seen(min(i + Br, N) - 1 + N_k - N, N_k)       # what the last query of this tile sees
        first = cuda.threadIdx.x // 32 * 16 * ROWS           # of the rows of this warp
        load_Q(Q_i, Q, h, i, N)
        load_Q(dO_i, dO, h, i, N)
        load_K(K_j, K, g, 0, keys)
        load_K(K_j + K_BYTES, V, g, 0, keys)
        cp_async_commit()
        clear(dQ_i)
        for u in range(ROWS):
            for r in range(2):
                row = i + first + 16 * u + row_of(cuda.laneid, 2 * r)
                L_i[u, r] = L[h, row] if row < N else float32(0)
                D_i[u, r] = D[h, row] if row < N else float32(0)
        for j in range(0, keys, Bc):
            cp_async_wait(0)
            cuda.syncthreads()                               # K_j and V_j are complete, nobody still reads those before
            load_K(K_next, K, g, j + Bc, keys)
            load_K(K_next + K_BYTES, V, g, j + Bc, keys)
            cp_async_commit()
            clear(S_ij)
            rows_by_rows(S_ij, Q_i, first, K_j)              # Alg. 2, l. 10
            weights(S_ij, L_i, scale)                        # Alg. 2, l. 11
            if not is_whole(i + first + N_k - N, j, keys):
                mask_tile(S_ij, float32(0), mask, b, i + first + N_k - N, j, keys)
            clear(dP_ij)
            rows_by_rows(dP_ij, dO_i, first, K_j + K_BYTES)  # Alg. 2, l. 13
            gradient(dP_ij, S_ij, D_i)                       # Alg. 2, l. 14
            rows_by_columns(dQ_i, dP_ij, K_j)                # Alg. 2, l. 15
            K_j, K_next = K_next, K_j
        cp_async_wait(0)                                     # nothing arrives after the block has gone
        for u in range(ROWS):
            for r in range(2):
                row = i + first + 16 * u + row_of(cuda.laneid, 2 * r)
                if row < N:
                    store_row(dQ, h, row, dQ_i, u, r, scale)

    return backward_dQ


def backward(Q, K, V, dO, scale, *, O=None, L=None, mask=None, blocks=None, device=None):
    """Q, dO (H, N, d), K and V (G, N_k, d) on the device, N > 0, d 64 or 128 -> dQ (H, N, d), dK and dV (G, N_k, d).

    All are float16, or bfloat16 as `np.dtype("V2")`; L (H, N) is float32. Without O and L it runs the forward pass
    first. blocks is not used: the two kernels have tiles of their own.
    """
    H, N, d = Q.shape
    G, N_k, _ = K.shape
    kind, mask = kind_of(Q), mask or no_mask(device)
    if L is None:
        O, L = forward(Q, K, V, scale, mask=mask, device=device)
    D = empty((H, N), np.float32, device)
    dQ, dK, dV = (empty_like(array, device) for array in (Q, K, V))
    bits = {name: array.view(np.uint16) for name, array in dict(Q=Q, K=K, V=V, dO=dO, O=O, dQ=dQ, dK=dK, dV=dV).items()}
    rowsum, rows = make_rowsum(kind, d)
    launch(rowsum, (tiles(N, rows), H), 32 * WARPS, bits["dO"], bits["O"], D, device=device)
    given = bits["Q"], bits["K"], bits["V"], mask.keys, bits["dO"], L, D
    Br, Bc = KEYS_OWNED[d]
    kernel = make_dKdV(Br, Bc, d, kind, int(mask.masked), mask.first())
    shared = bytes_dKdV(Br, Bc, d)
    launch_if_any(kernel, (tiles(N_k, Bc), G), 32 * WARPS, *given, bits["dK"], bits["dV"], np.float32(scale),
                  shared_bytes=shared, device=device)
    Br, Bc = QUERIES_OWNED[d]
    kernel = make_dQ(Br, Bc, d, kind, int(mask.masked), mask.seen)
    launch(kernel, (tiles(N, Br), H), 32 * WARPS, *given, bits["dQ"], np.float32(scale),
           shared_bytes=bytes_dQ(Br, Bc, d), device=device)
    return dQ, dK, dV
