"""Stage `register_tiled`: flash2 with several scores, and several elements of O, per thread.

Deletes loads from shared memory. A thread of flash2 loads an element of K_j or V_j for each multiply-add, and adds d
products to one sum, each of which waits for the one before. Here a thread owns a small matrix of results in registers:
for 4 × 4 scores it loads 4 elements of Q_i and 4 of K_j and multiplies 16 times, for 16 sums. HBM sees what it saw of
flash2: for one head, N queries, N_k keys, Tr = ⌈N/Br⌉:

    register_tiled loads Q Nd, K Tr·N_k·d, V Tr·N_k·d                               stores O Nd, L N

Thread (x, y) owns the rows y, y + Y, … of the tile of queries: in S_ij the keys x, x + X, …, in O_i columns
in fours, 4x to 4x + 3 and so on every 4X. X threads share a row, so its maximum and sum pass through shared memory.
"""

import math
from functools import cache

from numba import cuda, int64, uint32

from ..blocks import KEY_THREADS as X
from ..blocks import ROWS, filled_up, fitting_blocks, pitch, tiles
from ..engine.launch import empties, launch
from ..masks import make_weight, no_mask
from . import numba_type


@cache
def make_products(rows, others, columns, real):
    """Two products of tiles in shared memory; thread (x, y) adds to the results that it owns.

    rows_by_rows: C += A Bᵀ, with A of `rows` and B of `others`. rows_by_columns: C += A B, with A of `rows` and B of
    `others` rows. An unsigned index cannot count from the end of an array, and Numba need not ask whether it does.
    """
    Y, OTHERS, COLUMNS = rows // ROWS, others // X, columns // X

    @cuda.jit(device=True)
    def column(x, w):
        """Column w of those that thread x owns."""
        return 4 * x + (w // 4 * 4 * X + w % 4)

    @cuda.jit(device=True)
    def rows_by_rows(C, A, B, x, y):
        a = cuda.local.array(ROWS, real)                     # what is multiplied next
        b = cuda.local.array(OTHERS, real)
        for t0 in range(0, columns, 4):
            for t in range(4):                               # four neighbours: one load of 16 bytes
                for u in range(ROWS):
                    a[u] = A[y + Y * u, uint32(t0 + t)]
                for w in range(OTHERS):
                    b[w] = B[x + X * w, uint32(t0 + t)]
                for u in range(ROWS):
                    for w in range(OTHERS):
                        C[u, w] += a[u] * b[w]

    @cuda.jit(device=True)
    def rows_by_columns(C, A, B, x, y):
        a = cuda.local.array(ROWS, real)
        b = cuda.local.array(COLUMNS, real)
        for c0 in range(0, others, 2):
            for c in range(2):
                for u in range(ROWS):
                    a[u] = A[y + Y * u, uint32(c0 + c)]
                for w in range(COLUMNS):
                    b[w] = B[uint32(c0 + c), column(x, w)]
                for u in range(ROWS):
                    for w in range(COLUMNS):
                        C[u, w] += a[u] * b[w]

    return rows_by_rows, rows_by_columns, column


@cache
def make_fill(d, columns, Y, real):
    """fill(tile, M, h, first, there, x, y): rows `first` on of head h of M, `there` of them; what is not there is 0."""
    COLUMNS = columns // X

    @cuda.jit(device=True)
    def fill(tile, M, h, first, there, x, y):
        for r in range(y, tile.shape[0], Y):
            for w in range(COLUMNS):
                t = x + X * w
                tile[r, t] = M[h, first + r, t] if r < there and t < d else real(0)

    return fill


@cache
def make_forward(Br, Bc, d, real, allowed, seen, keep):
    """One tile of Q a block of X × Y threads, which own ROWS × KEYS scores and ROWS × COLUMNS elements of O each."""
    rows, others, columns = filled_up(Br, Bc, d)             # whole shares: what is not there is 0
    Y, KEYS, COLUMNS = rows // ROWS, others // X, columns // X
    width, width_P = pitch(columns), pitch(others, 8)
    rows_by_rows, rows_by_columns, column = make_products(rows, others, columns, real)
    fill, weight = make_fill(d, columns, Y, real), make_weight(real)

    @cuda.jit
    def register_tiled(Q, K, V, mask, O, L, scale, seed, p_drop):
        Q_i = cuda.shared.array((rows, width), real)
        K_j = cuda.shared.array((others, width), real)
        V_j = cuda.shared.array((others, width), real)
        P_ij = cuda.shared.array((rows, width_P), real)
        part = cuda.shared.array((rows, X), real)            # what each of X threads has of m or l
        S_ij = cuda.local.array((ROWS, KEYS), real)          # what this thread owns
        O_i = cuda.local.array((ROWS, COLUMNS), real)
        l_i = cuda.local.array(ROWS, real)
        m_i = cuda.local.array(ROWS, real)
        h = cuda.blockIdx.y
        g = h * K.shape[0] // Q.shape[0]
        b = h * mask.shape[0] // Q.shape[0]
        x, y = uint32(cuda.threadIdx.x) % uint32(X), uint32(cuda.threadIdx.y)  # % X: the compiler knows x < X
        N, N_k = Q.shape[1], K.shape[1]
        i = cuda.blockIdx.x * Br                             # Alg. 1, l. 3
        n_i = uint32(min(Br, N - i))                         # queries that there are in the tile
        keys = seen(min(i + Br, N) - 1 + N_k - N, N_k)       # what the last query of this tile sees
        fill(Q_i, Q, h, i, n_i, x, y)                        # Alg. 1, l. 4
        for u in range(ROWS):
            l_i[u] = real(0)                                 # Alg. 1, l. 5
            m_i[u] = real(-math.inf)
            for w in range(COLUMNS):
                O_i[u, w] = real(0)
        for j in range(0, keys, Bc):                         # Alg. 1, l. 6
            n_j = uint32(min(Bc, keys - j))
            fill(K_j, K, g, j, n_j, x, y)                    # Alg. 1, l. 7
            cuda.syncthreads()                               # K_j is complete
            for u in range(ROWS):
                for w in range(KEYS):
                    S_ij[u, w] = real(0)
            rows_by_rows(S_ij, Q_i, K_j, x, y)               # Alg. 1, l. 8
            for u in range(ROWS):
                r = y + Y * u
                m = real(-math.inf)
                for w in range(KEYS):
                    c = x + X * w
                    is_seen = r < n_i and c < n_j and allowed(mask, b, int64(i + r) + N_k - N, j + c)
                    S_ij[u, w] = S_ij[u, w] * scale if is_seen else real(-math.inf)
                    m = max(m, S_ij[u, w])
                part[r, x] = m
            cuda.syncthreads()                               # part is complete; nobody still reads P_ij, V_j
            fill(V_j, V, g, j, n_j, x, y)                    # Alg. 1, l. 7
            for u in range(ROWS):
                r = y + Y * u
                m_new = m_i[u]
                for w in range(X):
                    m_new = max(m_new, part[r, w])           # Alg. 1, l. 9
                old = weight(m_i[u], m_new)                  # rescales what earlier tiles gave
                m_i[u] = m_new
                l_i[u] *= old
                for w in range(COLUMNS):
                    O_i[u, w] *= old                         # Alg. 1, l. 10
                for w in range(KEYS):
                    c = x + X * w
                    p = weight(S_ij[u, w], m_new)
                    l_i[u] += p                              # Alg. 1, l. 9
                    P_ij[r, c] = p * keep(seed, p_drop, h, i + r, j + c)
            cuda.syncthreads()                               # P_ij and V_j are complete; nobody still reads K_j, part
            rows_by_columns(O_i, P_ij, V_j, x, y)            # Alg. 1, l. 10
        for u in range(ROWS):
            part[y + Y * u, x] = l_i[u]
        cuda.syncthreads()                                   # part is complete
        for u in range(ROWS):
            r = y + Y * u
            l = real(0)
            for w in range(X):
                l += part[r, w]
            if r < n_i:
                for w in range(COLUMNS):
                    t = column(x, w)
                    if t < d:
                        O[h, i + r, t] = O_i[u, w] / l if l != real(0) else real(0)  # Alg. 1, l. 12 and 14
                if x == 0:
                    L[h, i + r] = m_i[u] + math.log(l) if l != real(0) else m_i[u]  # Alg. 1, l. 13 and 15

    return register_tiled


def forward(Q, K, V, scale, *, mask=None, blocks=None, return_lse=False, device=None):
    """Q (H, N, d), K and V (G, N_k, d) on the device, N > 0, H a multiple of G -> O (H, N, d) and L (H, N).

    blocks: (Br, Bc). L costs N stores whether it is asked for or not. Raises ValueError or SharedMemoryError for tiles
    that do not fit.
    """
    H, N, d = Q.shape
    Br, Bc = fitting_blocks("register_tiled", blocks, d=d, dtype=Q.dtype)
    O, L = empties((H, N, d), (H, N), dtype=Q.dtype, device=device)
    mask = mask or no_mask(device)
    real = numba_type(Q.dtype)
    kernel = make_forward(Br, Bc, d, real, mask.allowed, mask.seen, mask.keep(real))
    arguments = Q, K, V, mask.keys, O, L, scale, mask.seed, mask.p_drop
    launch(kernel, (tiles(N, Br), H), (X, tiles(Br, ROWS)), *arguments, device=device)
    return O, L
