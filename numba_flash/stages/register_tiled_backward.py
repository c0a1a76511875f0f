"""Backward pass of stage `register_tiled`: that of flash2, split by owner, with several results per thread.

Deletes loads from shared memory, as the forward pass does. HBM sees what it saw of flash2. For one head, N queries, N_k
keys, Tr = ⌈N/Br⌉, Tc = ⌈N_k/Bc⌉:

    rowsum         loads dO Nd, O Nd                                              stores D N
    backward_dKdV  loads K N_k·d, V N_k·d, Q TcNd, dO TcNd, L TcN, D TcN          stores dK N_k·d, dV N_k·d
    backward_dQ    loads Q Nd, dO Nd, L N, D N, K Tr·N_k·d, V Tr·N_k·d            stores dQ Nd

A block owns one tile, of keys or of queries, and the other side passes in tiles. Thread (x, y) owns the rows y, y + Y,
… of the tile that stays: in S and dP the rows x, x + X, … of the tile that passes, in dK, dV or dQ columns in fours.
P and dS pass through shared memory, to be multiplied along their other side.
"""

import math
from functools import cache

from numba import cuda, int64, uint32

from ..blocks import KEY_THREADS as X
from ..blocks import ROWS, filled_up, fitting_blocks, passing, pitch, tiles
from ..engine.launch import empty, launch
from ..masks import make_weight, no_mask
from . import launch_if_any, numba_type
from .flash2_backward import row_sums
from .register_tiled import forward, make_products


@cache
def make_dKdV(Bc, d, real, allowed, first, keep):
    """One tile of keys a block; the queries pass in tiles of Br."""
    Br, _ = passing(d)
    keys, rows, columns = filled_up(Bc, Br, d)               # whole shares: what is not there is 0
    Y, QUERIES, COLUMNS = keys // ROWS, rows // X, columns // X
    width, width_P = pitch(columns), pitch(rows, 8)
    rows_by_rows, rows_by_columns, column = make_products(keys, rows, columns, real)
    weight = make_weight(real)

    @cuda.jit
    def backward_dKdV(Q, K, V, mask, dO, L, D, dK, dV, scale, seed, p_drop):
        K_j = cuda.shared.array((keys, width), real)
        V_j = cuda.shared.array((keys, width), real)
        Q_i = cuda.shared.array((rows, width), real)
        dO_i = cuda.shared.array((rows, width), real)
        P_ij = cuda.shared.array((keys, width_P), real)      # its columns are queries
        dS_ij = cuda.shared.array((keys, width_P), real)
        L_i = cuda.shared.array(rows, real)
        D_i = cuda.shared.array(rows, real)
        S_ij = cuda.local.array((ROWS, QUERIES), real)       # what this thread owns
        dP_ij = cuda.local.array((ROWS, QUERIES), real)
        dK_j = cuda.local.array((ROWS, COLUMNS), real)
        dV_j = cuda.local.array((ROWS, COLUMNS), real)
        g = cuda.blockIdx.y
        group = Q.shape[0] // K.shape[0]
        x, y = uint32(cuda.threadIdx.x) % uint32(X), uint32(cuda.threadIdx.y)  # % X: the compiler knows x < X
        N, N_k = Q.shape[1], K.shape[1]
        j = cuda.blockIdx.x * Bc                             # Alg. 2, l. 5
        n_j = uint32(min(Bc, N_k - j))                       # keys that there are in the tile
        for c in range(y, keys, Y):
            for w in range(COLUMNS):
                t = x + X * w
                inside = c < n_j and t < d
                K_j[c, t] = K[g, j + c, t] if inside else real(0)  # Alg. 2, l. 6
                V_j[c, t] = V[g, j + c, t] if inside else real(0)
        for u in range(ROWS):
            for w in range(COLUMNS):
                dK_j[u, w] = real(0)                         # Alg. 2, l. 7
                dV_j[u, w] = real(0)
        for h in range(g * group, (g + 1) * group):
            b = h * mask.shape[0] // Q.shape[0]
            for i in range(first(j + N - N_k), N, Br):       # Alg. 2, l. 8
                n_i = uint32(min(Br, N - i))
                for r in range(y, rows, Y):
                    if x == 0:
                        L_i[r] = L[h, i + r] if r < n_i else real(0)
                        D_i[r] = D[h, i + r] if r < n_i else real(0)
                    for w in range(COLUMNS):
                        t = x + X * w
                        inside = r < n_i and t < d
                        Q_i[r, t] = Q[h, i + r, t] if inside else real(0)  # Alg. 2, l. 9
                        dO_i[r, t] = dO[h, i + r, t] if inside else real(0)
                cuda.syncthreads()                           # the tiles are complete
                for u in range(ROWS):
                    for w in range(QUERIES):
                        S_ij[u, w] = real(0)
                        dP_ij[u, w] = real(0)
                rows_by_rows(S_ij, K_j, Q_i, x, y)           # Alg. 2, l. 10
                rows_by_rows(dP_ij, V_j, dO_i, x, y)         # Alg. 2, l. 13
                for u in range(ROWS):
                    c = y + Y * u
                    for w in range(QUERIES):
                        r = x + X * w
                        is_seen = r < n_i and c < n_j and allowed(mask, b, int64(i + r) + N_k - N, j + c)
                        p = weight(S_ij[u, w] * scale if is_seen else real(-math.inf), L_i[r])  # Alg. 2, l. 11
                        z = keep(seed, p_drop, h, i + r, j + c)  # Alg. 4 of the paper, l. 14, 15 and 18
                        P_ij[c, r] = p * z
                        dS_ij[c, r] = p * (dP_ij[u, w] * z - D_i[r])  # Alg. 2, l. 14
                cuda.syncthreads()                           # P_ij and dS_ij are complete
                rows_by_columns(dV_j, P_ij, dO_i, x, y)      # Alg. 2, l. 12
                rows_by_columns(dK_j, dS_ij, Q_i, x, y)      # Alg. 2, l. 16
                cuda.syncthreads()                           # nobody still reads what the next step overwrites
        for u in range(ROWS):
            c = y + Y * u
            for w in range(COLUMNS):
                t = column(x, w)
                if c < n_j and t < d:
                    dK[g, j + c, t] = dK_j[u, w] * scale     # Alg. 2, l. 18
                    dV[g, j + c, t] = dV_j[u, w]

    return backward_dKdV


@cache
def make_dQ(Br, d, real, allowed, seen, keep):
    """One tile of queries a block; the keys pass in tiles of Bc."""
    _, Bc = passing(d)
    rows, others, columns = filled_up(Br, Bc, d)
    Y, KEYS, COLUMNS = rows // ROWS, others // X, columns // X
    width, width_S = pitch(columns), pitch(others, 8)
    rows_by_rows, rows_by_columns, column = make_products(rows, others, columns, real)
    weight = make_weight(real)

    @cuda.jit
    def backward_dQ(Q, K, V, mask, dO, L, D, dQ, scale, seed, p_drop):
        Q_i = cuda.shared.array((rows, width), real)
        dO_i = cuda.shared.array((rows, width), real)
        K_j = cuda.shared.array((others, width), real)
        V_j = cuda.shared.array((others, width), real)
        dS_ij = cuda.shared.array((rows, width_S), real)
        L_i = cuda.shared.array(rows, real)
        D_i = cuda.shared.array(rows, real)
        S_ij = cuda.local.array((ROWS, KEYS), real)          # what this thread owns
        dP_ij = cuda.local.array((ROWS, KEYS), real)
        dQ_i = cuda.local.array((ROWS, COLUMNS), real)
        h = cuda.blockIdx.y
        g = h * K.shape[0] // Q.shape[0]
        b = h * mask.shape[0] // Q.shape[0]
        x, y = uint32(cuda.threadIdx.x) % uint32(X), uint32(cuda.threadIdx.y)  # % X: the compiler knows x < X
        N, N_k = Q.shape[1], K.shape[1]
        i = cuda.blockIdx.x * Br
        n_i = uint32(min(Br, N - i))                         # queries that there are in the tile
        keys = seen(min(i + Br, N) - 1 + N_k - N, N_k)       # what the last query of this tile sees
        for r in range(y, rows, Y):
            if x == 0:
                L_i[r] = L[h, i + r] if r < n_i else real(0)
                D_i[r] = D[h, i + r] if r < n_i else real(0)
            for w in range(COLUMNS):
                t = x + X * w
                inside = r < n_i and t < d
                Q_i[r, t] = Q[h, i + r, t] if inside else real(0)
                dO_i[r, t] = dO[h, i + r, t] if inside else real(0)
        for u in range(ROWS):
            for w in range(COLUMNS):
                dQ_i[u, w] = real(0)
        for j in range(0, keys, Bc):
            n_j = uint32(min(Bc, keys - j))
            for c in range(y, others, Y):
                for w in range(COLUMNS):
                    t = x + X * w
                    inside = c < n_j and t < d
                    K_j[c, t] = K[g, j + c, t] if inside else real(0)
                    V_j[c, t] = V[g, j + c, t] if inside else real(0)
            cuda.syncthreads()                               # the tiles are complete
            for u in range(ROWS):
                for w in range(KEYS):
                    S_ij[u, w] = real(0)
                    dP_ij[u, w] = real(0)
            rows_by_rows(S_ij, Q_i, K_j, x, y)               # Alg. 2, l. 10
            rows_by_rows(dP_ij, dO_i, V_j, x, y)             # Alg. 2, l. 13
            for u in range(ROWS):
                r = y + Y * u
                for w in range(KEYS):
                    c = x + X * w
                    is_seen = r < n_i and c < n_j and allowed(mask, b, int64(i + r) + N_k - N, j + c)
                    p = weight(S_ij[u, w] * scale if is_seen else real(-math.inf), L_i[r])  # Alg. 2, l. 11
                    dP_ij[u, w] *= keep(seed, p_drop, h, i + r, j + c)
                    dS_ij[r, c] = p * (dP_ij[u, w] - D_i[r])  # Alg. 2, l. 14
            cuda.syncthreads()                               # dS_ij is complete
            rows_by_columns(dQ_i, dS_ij, K_j, x, y)          # Alg. 2, l. 15
            cuda.syncthreads()                               # nobody still reads what the next step overwrites
        for u in range(ROWS):
            r = y + Y * u
            for w in range(COLUMNS):
                t = column(x, w)
                if r < n_i and t < d:
                    dQ[h, i + r, t] = dQ_i[u, w] * scale

    return backward_dQ


def backward(Q, K, V, dO, scale, *, O=None, L=None, mask=None, blocks=None, device=None):
    """Q, dO (H, N, d), K and V (G, N_k, d) on the device, N > 0 -> dQ (H, N, d), dK and dV (G, N_k, d).

    Without O (H, N, d) and L (H, N) it runs the forward pass first. blocks: (Br, Bc), the queries that a block of
    backward_dQ owns and the keys that a block of backward_dKdV owns; the other side passes in tiles of `passing(d)`
    rows. Raises ValueError or SharedMemoryError for tiles that do not fit.
    """
    H, N, d = Q.shape
    G, N_k, _ = K.shape
    Br, Bc = fitting_blocks("register_tiled", blocks, d=d, dtype=Q.dtype, direction="backward")
    real = numba_type(Q.dtype)
    mask = mask or no_mask(device)
    if L is None:
        O, L = forward(Q, K, V, scale, mask=mask, device=device)
    D = row_sums(dO, O, device=device)
    dQ, dK, dV = (empty(shape, Q.dtype, device) for shape in (Q.shape, K.shape, V.shape))
    given, numbers = (Q, K, V, mask.keys, dO, L, D), (scale, mask.seed, mask.p_drop)
    kernel = make_dKdV(Bc, d, real, mask.allowed, mask.first(), mask.keep(real))
    launch_if_any(kernel, (tiles(N_k, Bc), G), (X, tiles(Bc, ROWS)), *given, dK, dV, *numbers, device=device)
    kernel = make_dQ(Br, d, real, mask.allowed, mask.seen, mask.keep(real))
    launch(kernel, (tiles(N, Br), H), (X, tiles(Br, ROWS)), *given, dQ, *numbers, device=device)
    return dQ, dK, dV
