"""Wrong answers, as students write them: text of a solution that becomes another, and what the message must teach."""

from numba_flash.course.exercises import EXERCISES

BARRIER = "cuda.syncthreads()"
TILES_DONE = f"        {BARRIER}\n        # --- end"
SKIP = "        if block_mask[cuda.blockIdx.x, j // Bc] == 0:\n            continue\n"
LOADS = f"""        for e in range(r, min(Bc, N_k - j) * d, Br):
            K_j[e // d, e % d] = K[j + e // d, e % d]
            V_j[e // d, e % d] = V[j + e // d, e % d]
        {BARRIER}
"""
HOST = """    O = nf.empty(Q.shape, np.float32)
    Q, K, V = nf.to_device(Q), nf.to_device(K), nf.to_device(V)
    nf.launch(make_forward(Q.shape[1]), -(-len(Q) // Br), Br, Q, K, V, O, np.float32(scale))
    return nf.to_host(O)"""

ONE_THREAD = """def make_forward(d):
    @cuda.jit
    def forward(Q, K, V, O, scale):
        Q_i = cuda.local.array((Br, d), float32)
        O_i = cuda.local.array((Br, d), float32)
        l_i = cuda.local.array(Br, float32)
        m_i = cuda.local.array(Br, float32)
        K_j = cuda.local.array(d, float32)
        V_j = cuda.local.array(d, float32)
        first = cuda.blockIdx.x * Br
        rows = min(Br, Q.shape[0] - first)
        for r in range(rows):
            l_i[r] = float32(0)
            m_i[r] = float32(-math.inf)
            for t in range(d):
                Q_i[r, t] = Q[first + r, t]
                O_i[r, t] = float32(0)
        for j in range(K.shape[0]):
            for t in range(d):
                K_j[t] = K[j, t]
                V_j[t] = V[j, t]
            for r in range(rows):
                s = float32(0)
                for t in range(d):
                    s += Q_i[r, t] * K_j[t]
                s *= scale
                m_new = max(m_i[r], s)
                old = math.exp(m_i[r] - m_new)
                p = math.exp(s - m_new)
                l_i[r] = l_i[r] * old + p
                m_i[r] = m_new
                for t in range(d):
                    O_i[r, t] = O_i[r, t] * old + p * V_j[t]
        for r in range(rows):
            for t in range(d):
                O[first + r, t] = O_i[r, t] / l_i[r]

    return forward
"""

ATTENTION = EXERCISES["05_attention"].solution
KERNEL = ATTENTION[ATTENTION.rindex("def make_forward") : ATTENTION.index("# --- end of your code")]
ONE_THREAD += ATTENTION[ATTENTION.index("\n\ndef attention") : ATTENTION.index("# --- end of your code")].replace(
    "Br, Q, K", "1, Q, K"
)

REGISTERS = EXERCISES["12_registers"].solution
PRODUCTS = REGISTERS[REGISTERS.index("        for t in range(T):") : REGISTERS.index("        # --- end of your code")]
DOT_PRODUCTS = """        for u in range(4):
            for w in range(4):
                for t in range(T):
                    S_ij[u, w] += Q_i[y + 4 * u, t] * K_j[x + 4 * w, t]
"""
KEYS_AGAIN = """        for t in range(T):
            for u in range(4):
                q[u] = Q_i[y + 4 * u, t]
                for w in range(4):
                    k[w] = K_j[x + 4 * w, t]
                    S_ij[u, w] += q[u] * k[w]
"""
FIRST_ROW = PRODUCTS.replace("S_ij[u, w] += q[u]", "S_ij[0, w] += q[0]").replace(
    "            for u in range(4):\n                for w", "            for w"
)

# exercise: [(old text, new text, what the message says)], the criterion that fails first before a colon
WRONG = {
    "00_guard": [
        (
            "if i < X.shape[0]:",
            "if True:",
            "strict: OutOfBounds|the guard is missing|Z[i] = factor * X[i] + Y[i]|X, axis 0",
        ),
        (
            "i = cuda.grid(1)\n    if i < X.shape[0]:",
            "for i in range(X.shape[0]):",
            "strict: RaceDetected|A thread has one element, that of its own number, cuda.grid(1)",
        ),
        (
            "i = cuda.grid(1)\n    if i < X.shape[0]:",
            "i = min(cuda.grid(1), X.shape[0] - 1)\n    if True:",
            "strict: RaceDetected|threads past the end do nothing",
        ),
        ("cuda.grid(1)", "cuda.threadIdx.x", "strict: RaceDetected|cuda.threadIdx.x was taken for the thread's number"),
        (
            "i < X.shape[0]:",
            "i < X.shape[0] - 1:",
            "correct: Z[999] was never written|element 999|guard keeps too many",
        ),
        ("factor * X[i] + Y[i]", "X[i] + Y[i]", "correct: the factor is left out"),
        ("i < X.shape[0]:", "i <= X.shape[0]:", "strict: OutOfBounds|lets one thread too many through"),
        (
            "Z[i] = factor * X[i] + Y[i]",
            "Z[i] = factor * X[i]\n        Z[i] = Z[i] + Y[i]",
            "bill: Z loads 1,000|no loads",
        ),
        (
            "if i < X.shape[0]:\n        Z[i] = factor * X[i] + Y[i]",
            "if i == 0:\n        for k in range(X.shape[0]):\n            Z[k] = factor * X[k] + Y[k]",
            "parallel: Thread 0 does all the work of block 0: 3,000 loads and stores in HBM|at most 3 = 3|"
            "what one thread does",
        ),
    ],
    "00_reduce": [
        (
            f"    {BARRIER}\n    while",
            "    while",
            "strict: RaceDetected|Two are needed|  tile[tx] += tile[tx + half]",
        ),
        (f"        {BARRIER}\n        half", "        half", "strict: RaceDetected|a barrier is missing"),
        (
            f"        {BARRIER}\n        half",
            f"            {BARRIER}\n        half",
            "strict: BarrierDivergence|inside `if tx",
        ),
        ("while half > 0:", "while half > 1:", "correct: that with half = 1"),
        ("if tx < half:", "if tx <= half:", "strict: |tx"),
        (
            "while half > 0:\n        if tx < half:\n            tile[tx] += tile[tx + half]\n        "
            f"{BARRIER}\n        half //= 2",
            f"s = float32(0)\n    for k in range(B):\n        s += tile[k]\n    {BARRIER}\n    tile[tx] = s",
            "parallel: does more than its share|all threads do this alike, each of them again",
        ),
        (
            "if tx < half:\n            tile[tx] += tile[tx + half]",
            "if tx > 0:\n            tile[0] += tile[tx]",
            "strict: RaceDetected|no barrier parts the threads in one line|index must",
        ),
        (
            "while half > 0:\n        if tx < half:\n            tile[tx] += tile[tx + half]\n        "
            f"{BARRIER}\n        half //= 2",
            "if tx == 0:\n        for k in range(1, B):\n            tile[0] += tile[k]",
            "parallel: Thread 0 of block 0 does more than its share: 191|in shared memory|2·(3·log₂B + 2)",
        ),
    ],
    "01_fuse": [
        ("math.exp(S[i] - m) / l\n    # --- end", "math.exp(S[i] - m)\n    # --- end", "correct: not divided by l yet"),
        ("math.exp(S[i] - m) / l\n    # --- end", "math.exp(S[i]) / l\n    # --- end", "correct: m is not subtracted"),
        (
            "math.exp(S[i] - m) / l\n    # --- end",
            "math.exp(S[i] + m) / l\n    # --- end",
            "correct: Likely: That is S + m",
        ),
        (
            "math.exp(S[i] - m) / l\n    # --- end",
            "math.exp(m - S[i]) / l\n    # --- end",
            "correct: Likely: That is m - S",
        ),
        (
            "math.exp(S[i] - m) / l\n    # --- end",
            "math.exp(S[i] - m) * l\n    # --- end",
            "correct: Likely: It is multiplied",
        ),
        (
            "P[i] = math.exp(S[i] - m) / l\n    # --- end",
            "P[i] = S[i] - m\n        P[i] = math.exp(P[i]) / l\n    # --- end",
            "bill: P stores 600|at most 300 = N|P loads 300|a register",
        ),
    ],
    "02_scores": [
        ("acc * scale", "acc", "correct: not multiplied by scale"),
        ("j, i = cuda.grid(2)", "i, j = cuda.grid(2)", "correct: never written|all from column 32|gives x first"),
        ("acc += Q", "acc = Q", "correct: `acc` is replaced"),
        ("range(Q.shape[1])", "range(K.shape[0])", "strict: OutOfBounds|t in range(Q.shape[1])"),
        ("* K[j, t]", "* K[t, j]", "strict: OutOfBounds|Q[i, t] * K[j, t]"),
        ("range(Q.shape[1])", "range(Q.shape[1] - 1)", "correct: ends one step too early"),
        (
            "acc = float32(0)\n        for t in range(Q.shape[1]):\n            acc += Q[i, t] * K[j, t]\n"
            "        S[i, j] = acc * scale",
            "S[i, j] = 0\n        for t in range(Q.shape[1]):\n            S[i, j] += Q[i, t] * K[j, t] * scale",
            "bill: S stores 14,000, at most 1,000 = N·N_k|in a variable",
        ),
        (
            "acc = float32(0)\n        for t in range(Q.shape[1]):\n            acc += Q[i, t] * K[j, t]\n"
            "        S[i, j] = acc * scale",
            "for t in range(Q.shape[1]):\n            S[i, j] += Q[i, t] * K[j, t] * scale",
            "strict: UninitializedRead|Let it grow in a variable",
        ),
        (
            "if i < S.shape[0] and j < S.shape[1]:\n        acc = float32(0)\n        for t in range(Q.shape[1]):\n"
            "            acc += Q[i, t] * K[j, t]\n        S[i, j] = acc * scale",
            "if i == 0 and j == 0:\n        for a in range(S.shape[0]):\n            for b in range(S.shape[1]):\n"
            "                acc = float32(0)\n                for t in range(Q.shape[1]):\n"
            "                    acc += Q[a, t] * K[b, t]\n                S[a, b] = acc * scale",
            "parallel: Thread (0, 0) does all the work of block (0, 0): 27,000|at most 27 = 2·d + 1",
        ),
    ],
    "02_softmax": [
        (
            "m = float32(-math.inf)\n        for",
            "m = float32(-1e30)\n        for",
            "correct: m begins at a finite number|all in rows 5, 19, 33",
        ),
        ("            m = max(m, S[i, j])\n", "            m = float32(0)\n", "correct: maximum is not subtracted"),
        (
            "m = float32(-math.inf)\n        for",
            "m = float32(0)\n        for",
            "correct: m begins at 0|all in rows 2,",
        ),
        ("        if l == float32(0):\n            l = float32(1)\n", "", "correct: -∞ alone became nan|rows 4"),
        (
            "        if m == float32(-math.inf):\n            m = float32(0)\n",
            "",
            "correct: -∞ alone became nan|rows 4",
        ),
        ("math.exp(S[i, j] - m) / l\n", "math.exp(S[i, j] - m)\n", "correct: not divided by their sum"),
        (
            "P[i, j] = math.exp(S[i, j] - m) / l",
            "P[i, j] = math.exp(S[i, j] - m)\n            P[i, j] = P[i, j] / l",
            "bill: P stores|P loads|divide before you store",
        ),
    ],
    "03_tile": [
        (
            f"        {BARRIER}\n        for t",
            "        for t",
            "strict: RaceDetected|a barrier is missing|  acc += Q_i[ty, t] * K_j[tx, t]",
        ),
        (
            TILES_DONE,
            "        # --- end",
            "strict: RaceDetected|a barrier is missing|T):  # walk along d, one tile at a time\n",
        ),
        ("* K_j[tx, t]", "* K_j[ty, t]", "correct: yours is tx"),
        ("* K_j[tx, t]", "* K_j[t, tx]", "correct: Likely: K_j is used across"),
        (
            "Q_i[ty, tx] = load_or_zero(Q, row, t0 + tx)",
            "Q_i[ty, 0] = load_or_zero(Q, row, t0 + tx)",
            "strict: RaceDetected|no barrier parts the threads in one line",
        ),
        (
            "Q_i[ty, tx] = load_or_zero(Q, row, t0 + tx)",
            "for t in range(T):\n            Q_i[ty, t] = load_or_zero(Q, row, t0 + t)",
            "strict: RaceDetected|no loop goes over elements of others",
        ),
        ("cuda.blockIdx.x * T + ty, t0", "col, t0", "correct: row ty of the tile belongs to key"),
        ("range(0, Q.shape[1], T)", "range(0, Q.shape[1] // T * T, T)", "correct: hangs over the edge, is left out"),
        ("* K_j[tx, t]", "* load_or_zero(K, col, t0 + t)", "bill: K loads|N_k·d·⌈N/T⌉|use K_j[tx, t]"),
        ("load_or_zero(Q, row, t0 + tx)", "Q[row, t0 + tx]", "strict: OutOfBounds|load with load_or_zero"),
        (
            "Q_i[ty, tx] = load_or_zero(Q, row, t0 + tx)\n"
            "        K_j[ty, tx] = load_or_zero(K, cuda.blockIdx.x * T + ty, t0 + tx)",
            "if tx == 0 and ty == 0:\n            for a in range(T):\n                for b in range(T):\n"
            "                    Q_i[a, b] = load_or_zero(Q, cuda.blockIdx.y * T + a, t0 + b)\n"
            "                    K_j[a, b] = load_or_zero(K, cuda.blockIdx.x * T + a, t0 + b)",
            "parallel: Thread (0, 0) of block (0, 0) does more than its share: 209|2·⌈d/T⌉ + 1",
        ),
    ],
    "03_output": [
        ("range(0, P.shape[1], T)", "range(0, P.shape[1] // T * T, T)", "correct: hangs over the edge, is left out"),
        ("V_j[j, tx]", "V_j[tx, j]", "correct: its rows are keys"),
        ("range(0, P.shape[1], T)", "range(0, V.shape[1], T)", "correct: Likely: The loop walks along d"),
        ("range(0, P.shape[1], T)", "range(0, O.shape[0], T)", "correct: Likely: The loop walks along the queries"),
        (f"        {BARRIER}\n    if row", "    if row", "strict: RaceDetected|a barrier is missing"),
        ("P_ij[ty, j] * ", "load_or_zero(P, row, j0 + j) * ", "bill: P loads|N·N_k·⌈d/T⌉|use P_ij[ty, j]"),
        (
            "if row < O.shape[0] and col < O.shape[1]:",
            "if row < P.shape[1] and col < O.shape[1]:",
            "strict: OutOfBounds|guard",
        ),
    ],
    "04_online": [
        ("lO_i = lO_i * old + p", "lO_i = lO_i + p", "correct: l·O is not rescaled"),
        ("l_i = l_i * old + p\n", "l_i = l_i + p\n", "correct: l is not rescaled"),
        ("m_i = float32(-math.inf)", "m_i = float32(0)", "correct: m begins at 0"),
        ("m_i = float32(-math.inf)", "m_i = float32(-1e30)", "correct: m begins at a finite number"),
        ("lO_i / l_i if l_i != float32(0) else float32(0)", "lO_i / l_i", "correct: l is 0, and 0/0 is nan"),
        ("O[i] = lO_i / l_i if", "O[i] = lO_i if", "correct: it is not divided by l"),
        (
            "s = S[i, j]\n            m_new = max(m_i, s)",
            "s = S[i, j]\n            m_new = max(m_i, S[i, j])",
            "bill: S loads",
        ),
    ],
    "04_merge": [
        (
            "part_1 * O_1[i, t] + part_2",
            "weight(a, m_new) * O_1[i, t] + weight(b, m_new)",
            "correct: multiply by it first",
        ),
        (
            "/ l_new if l_new != float32(0) else float32(0)",
            "/ l_new",
            "correct: 0/0",
        ),
        ("m_new = max(a, b)", "m_new = a", "correct: where m_2 is larger"),
        (
            "(part_1 * O_1[i, t] + part_2 * O_2[i, t]) / l_new if l_new != float32(0) else float32(0)",
            "(O_1[i, t] + O_2[i, t]) / float32(2)",
            "correct: Likely: That is the mean of O_1 and O_2",
        ),
        (
            "part_1 = weight(a, m_new) * l_1[i]",
            "part_1 = weight(a, m_new)",
            "correct: Likely: l_1 is left out: part 1 counts with weight(m_1, m)·l_1",
        ),
        (
            "part_2 = weight(b, m_new) * l_2[i]",
            "part_2 = weight(b, m_new)",
            "correct: Likely: l_2 is left out: part 2 counts with weight(m_2, m)·l_2",
        ),
        ("(part_1 * O_1", "(weight(a, m_new) * O_1", "correct: Likely: In O l_1 is left out"),
        ("+ part_2 * O_2", "+ weight(b, m_new) * O_2", "correct: Likely: In O l_2 is left out"),
        ("(part_1 * O_1[i, t] + part_2 * O_2[i, t])", "(part_1 * O_1[i, t])", "correct: Likely: O_2 is left out"),
        ("part_1 = weight(a, m_new) * l_1[i]", "part_1 = l_1[i]", "correct: Part 1 is not brought"),
        ("m[i] = m_new", "pass", "correct: No element of m was written"),
    ],
    "05_rescale": [
        ("(l_old * O[i, t] +", "(l[i] * O[i, t] +", "correct: The old O is not rescaled"),
        ("l_old = weight(m_i, m_new) * l[i]", "l_old = l[i]", "correct: The old l and O are not rescaled"),
        ("+ new * acc) / l_new", "+ acc) / l_new", "correct: What the tile adds to O is not brought"),
        ("l_old + new * l_tile", "l_old + l_tile", "correct: What the tile adds to l is not brought"),
        ("new = weight(m_tile, m_new)", "new = float32(1)", "correct: What the tile gives is not brought"),
        ("l_old * O[i, t]", "weight(m_i, m_new) * O[i, t]", "correct: taken for l·O"),
        ("        m[i] = m_new\n", "", "correct: Likely: m is not stored"),
        ("        l[i] = l_new\n", "", "correct: Likely: l is not stored"),
        ("        l[i] = l_new\n        m[i] = m_new\n", "", "correct: Likely: Neither l nor m is stored"),
        (
            "weight(m_i, m_new) * l[i]",
            "weight(m_i, m_new)",
            "correct: Likely: The old l is left out: what was weighs weight(m_i, m_new)·l",
        ),
        ("l_new = l_old + new * l_tile", "l_new = new * l_tile", "correct: Likely: l_new is the new tile's alone"),
        ("(l_old * O[i, t] + new * acc)", "(new * acc)", "correct: Likely: The old O is left out"),
        ("m_new = max(m_i, m_tile)", "m_new = m_i + m_tile", "correct: To find it: take two tiles by hand"),
        (
            "if c < keys:\n                    acc",
            "if True:\n                    acc",
            "strict: OutOfBounds|the last tile has fewer than Bc keys|only if c < keys",
        ),
        ("/ l_new if l_new != float32(0) else float32(0)", "/ l_new", "correct: 0/0 is nan"),
    ],
    "05_flash2": [
        ("O_i[t] *= old", "O_i[t] *= float32(1)", "correct: O_i is not rescaled"),
        ("        l_i *= old\n", "", "correct: l_i is not rescaled"),
        ("S_ij[c, r] = s * scale", "S_ij[c, r] = s", "correct: not multiplied by scale"),
        ("        m_i = m_new\n", "", "correct: m_i becomes m_new"),
        ("max(m_new, S_ij[c, r])", "max(m_new, s)", "correct: The maximum is that of the scores before scale"),
        ("m_new = m_i", "m_new = float32(-1e30)", "correct: from one tile to the next"),
        ("O_i[t] += p * V_j[c, t]", "O_i[t] += p * V[j + c, t]", "bill: V loads|use V_j, in shared memory"),
        (
            "for c in range(keys):\n            p",
            "for c in range(Bc):\n            p",
            "correct: Keys of the tile before count twice|range(keys)",
        ),
    ],
    "05_attention": [
        ("m_i = float32(-math.inf)", "m_i = float32(-1e30)", "correct: m begins at a finite number"),
        (KERNEL, ONE_THREAD, "parallel: Block 0 has one thread, which does all its work"),
        (
            f"            {BARRIER}\n            m_new",
            "            m_new",
            "strict: RaceDetected|after the loads of K_j and V_j",
        ),
        ("O_i[t] *= old", "O_i[t] *= float32(1)", "correct: rescaled when m grows"),
        ("S_ij[c, r] = s * scale", "S_ij[c, r] = s", "correct: not multiplied by scale"),
        ("Br, Bc = 64, 16", "Br, Bc = 8, 16", "bill: total elements|2·N_k·d·⌈N/Br⌉|K loads|times as much"),
        ("math.exp(S_ij[c, r] - m_new)", "math.exp(S_ij[c, r])", "correct: O["),
        (
            HOST,
            "    return specification(Q, K, V, scale)",
            "message: launched no kernel: its bill shows no loads",
        ),
        (
            HOST,
            "    nf.launch(touch, 1, 1, Q)\n    return specification(Q, K, V, scale)\n\n\n"
            "@cuda.jit\ndef touch(Q):\n    Q[0, 0] + Q[0, 0]",
            "message: make 2 loads for|it is not they that compute the answer",
        ),
        (
            HOST,
            "    O = nf.empty(Q.shape, np.float32)\n"
            "    nf.launch(copy, 1, 1, Q, K, V, specification(Q, K, V, scale), O)\n    return nf.to_host(O)\n\n\n"
            "@cuda.jit\ndef copy(Q, K, V, R, O):\n    for i in range(O.shape[0]):\n"
            "        for t in range(O.shape[1]):\n            O[i, t] = R[i, t] + float32(0) * Q[i, t]",
            "message: When `copy` is launched for N = 70|its argument R holds the answer already",
        ),
        (
            HOST,
            "    return nf.attention(Q, K, V, scale=scale)",
            "message: a stage of numba_flash",
        ),
    ],
    "06_no_matrix": [
        ("p = math.exp(s * scale - m)", "p = math.exp(s - m)", "correct: in the second pass"),
        ("m = max(m, s * scale)", "m = max(m, s)", "correct: The maximum is that of the scores before scale"),
        ("O[i, t] = O_i[t] / l", "O[i, t] = O_i[t]", "correct: not divided by l"),
        ("s += Q_i[t] * K[j, t]", "s += Q[i, t] * K[j, t]", "bill: Q loads|use Q_i, in registers"),
        ("O_i[t] += p", "O_i[t] = p", "correct: replaced, not added to"),
        ("m = float32(-math.inf)", "m = float32(-1e30)", "correct: m begins at a finite number"),
        ("p = math.exp(s * scale - m)", "p = math.exp(s * scale)", "correct: The maximum is not subtracted"),
    ],
    "07_delta": [
        ("D_i += dO[i, t] * O[i, t]", "D_i += O[i, t]", "correct: dO is left out"),
        ("if i < O.shape[0]:", "if True:", "strict: OutOfBounds|the guard is missing"),
        (
            "D_i = float32(0)\n        for t in range(O.shape[1]):\n            D_i += dO[i, t] * O[i, t]\n        "
            "D[i] = D_i",
            "D[i] = 0\n        for t in range(O.shape[1]):\n            D[i] += dO[i, t] * O[i, t]",
            "bill: D stores|D loads|add up in a variable",
        ),
        ("D_i += dO[i, t] * O[i, t]", "D_i = dO[i, t] * O[i, t]", "correct: Only the last column counts"),
    ],
    "07_recompute": [
        ("s * scale - L_i", "s - L_i", "correct: not multiplied by scale"),
        ("math.exp(s * scale - L_i)", "math.exp(s * scale) / math.exp(L_i)", "correct: inf/inf is nan. Subtract first"),
        ("math.exp(s * scale - L_i)", "math.exp(s * scale) * math.exp(-L_i)", "correct: inf/inf is nan. Subtract"),
        ("* (dp - D_i)", "* dp", "correct: D is not subtracted"),
        ("s * scale - L_i", "s * scale + L_i", "correct: L has the wrong sign"),
        ("* (dp - D_i)", "* (dp - D_i) * scale", "correct: scale comes twice"),
        ("dQ_i[t] += ds", "dQ_i[t] = ds", "correct: Only the last key counts"),
        ("dp += dO_i[t] * V_j[c, t]", "dp += dO_i[t] * V[j + c, t]", "bill: V loads|use V_j, in shared memory"),
        ("s += Q_i[t] * K_j[c, t]", "s += Q_i[t] * K_j[r, t]", "strict: OutOfBounds|keys of the tile, c"),
    ],
    "08_causal": [
        ("j <= i + N_k - N:", "j <= i:", "correct: The last query belongs to the last key"),
        ("j <= i + N_k - N:", "j < i + N_k - N:", "correct: ≤ and not <"),
        ("float32(-math.inf)", "float32(-1e9)", "correct: a large negative number here"),
        (
            "        if j <= i + N_k - N:\n            acc = float32(0)\n            for t in range(Q.shape[1]):\n"
            "                acc += Q[i, t] * K[j, t]\n            S[i, j] = acc * scale\n        else:",
            "        acc = float32(0)\n        for t in range(Q.shape[1]):\n            acc += Q[i, t] * K[j, t]\n"
            "        S[i, j] = acc * scale\n        if j > i + N_k - N:",
            "bill: Q loads|seen·d|ask first, then multiply|S stores",
        ),
        ("        else:\n            S[i, j] = float32(-math.inf)\n", "", "correct: a hidden score must be stored"),
    ],
    "08_skip": [
        (
            "last = min(cuda.blockIdx.x * Br + Br, N) - 1",
            "last = cuda.blockIdx.x * Br",
            "correct: what the first query of the tile sees",
        ),
        ("max(0, last + 1 + N_k - N)", "min(last + 1, N_k)", "correct: N_k - N is missing"),
        ("max(0, last + 1 + N_k - N)", "N_k", "bill: K loads 1,480, at most 936|`keys` is too large"),
        ("max(0, last + 1 + N_k - N)", "max(0, i + 1 + N_k - N)", "strict: |the same for all threads"),
        (
            "last = min(cuda.blockIdx.x * Br + Br, N) - 1",
            "last = cuda.blockIdx.x * Br + Br - 1",
            "strict: OutOfBounds|larger than N_k",
        ),
        (
            "max(0, last + 1 + N_k - N)",
            "min(N_k, -(-max(0, last + 1 + N_k - N) // Bc) * Bc)",
            "bill: K loads 928, at most 912|`keys` is too large|rounded up to whole tiles",
        ),
    ],
    "09_dropout": [
        ("(z * dP[h, i, j] - D[h, i])", "(dP[h, i, j] - D[h, i])", "correct: Z is left out"),
        ("(z * dP[h, i, j] - D[h, i])", "z * (dP[h, i, j] - D[h, i])", "correct: Z multiplies D, too"),
        ("keep(seed, p_drop, h, i, j)", "keep(seed, p_drop, 0, i, j)", "correct: the Z of head 0"),
        ("keep(seed, p_drop, h, i, j)", "keep(seed, p_drop, h, j, i)", "correct: exchanged"),
        (
            "keep(seed, p_drop, h, i, j)",
            "keep(seed, p_drop, h, cuda.threadIdx.y, cuda.threadIdx.x)",
            "correct: it depends on the tiles",
        ),
    ],
    "10_blocks": [
        (SKIP, "", "correct: The mask is not asked"),
        ("            continue\n", "            break\n", "correct: `continue` goes on to the next"),
        ("cuda.blockIdx.x, j // Bc]", "cuda.blockIdx.x, j]", "strict: OutOfBounds|its column is j // Bc"),
        ("range(r, min(Bc, N_k - j) * d, Br)", "range(r, Bc * d, Br)", "strict: OutOfBounds|hangs over the edge"),
        (f"{SKIP}{LOADS}", f"{LOADS}{SKIP}", "bill: K loads|visited·d|ask the mask first"),
        (" == 0:\n            continue", " != 1:\n            continue", "correct: 0 means left out, and nothing else"),
        (" == 0:\n            continue", " != 0:\n            continue", "correct: 0 means left out"),
    ],
    "11_split": [
        (f"    {BARRIER}\n", "", "strict: RaceDetected|a barrier is missing"),
        ("w = weight(m_i[s], m)", "w = float32(1)", "correct: bring them to a common one"),
        ("acc / l if l != float32(0) else float32(0)", "acc / l", "correct: 0/0 is nan"),
        ("m = max(m, m_i[s])", "m = max(m, m_s[s, i])", "bill: m_s loads|let thread t fetch"),
        ("m = float32(-math.inf)", "m = float32(0)", "correct: m begins at 0"),
        ("m = float32(-math.inf)", "m = float32(-1e30)", "correct: m begins at a finite number"),
        (
            "if t < n:\n        m_i[t] = m_s[t, i]\n        l_i[t] = l_s[t, i]",
            "if t == 0:\n        for s in range(n):\n            m_i[s] = m_s[s, i]\n            l_i[s] = l_s[s, i]",
            "parallel: Thread 0 of block 0 does more than its share|n + 3",
        ),
    ],
    "12_registers": [
        (
            "q[u] = Q_i[y + 4 * u, t]\n                k[u] = K_j[x +",
            "q[u] = Q_i[x + 4 * u, t]\n                k[u] = K_j[y +",
            "correct: x and y are exchanged: y counts rows",
        ),
        ("S_ij[u, w] += q[u]", "S_ij[w, u] += q[u]", "correct: Likely: u and w are exchanged"),
        ("* k[w]", "* k[u]", "correct: S_ij[u, w] has the key of u"),
        ("+= q[u]", "+= q[w]", "correct: S_ij[u, w] has the row of w"),
        (
            "Q_i[y + 4 * u, t]\n                k[u] = K_j[x + 4 * u, t]",
            "Q_i[4 * y + u, t]\n                k[u] = K_j[4 * x + u, t]",
            "correct: The thread owns every fourth, y + 4 * u and x + 4 * w: so the stores",
        ),
        ("Q_i[y + 4 * u, t]", "Q_i[4 * y + u, t]", "correct: The rows are four neighbours, 4 * y + u"),
        ("K_j[x + 4 * u, t]", "K_j[4 * x + u, t]", "correct: The keys are four neighbours, 4 * x + w"),
        (
            "Q_i[y + 4 * u, t]\n                k[u] = K_j[x + 4 * u, t]",
            "Q_i[y, t]\n                k[u] = K_j[x, t]",
            "correct: All scores of a thread are that of its first row and its first key",
        ),
        ("Q_i[y + 4 * u, t]", "Q_i[y, t]", "correct: Only one row of the thread takes part"),
        ("K_j[x + 4 * u, t]", "K_j[x, t]", "correct: Only one key of the thread takes part"),
        (PRODUCTS, FIRST_ROW, "correct: Only the first row of S_ij grows"),
        (
            "                for w in range(4):\n                    S_ij[u, w] += q[u] * k[w]",
            "                S_ij[u, 0] += q[u] * k[0]",
            "correct: Only the first column of S_ij grows",
        ),
        (
            "                for w in range(4):\n                    S_ij[u, w] += q[u] * k[w]",
            "                S_ij[u, u] += q[u] * k[u]",
            "correct: Only 4 of the 16 products are added, those of q[u] and k[u]",
        ),
        ("K_j[x + 4 * u, t]", "K_j[t, x + 4 * u]", "correct: K_j is used across"),
        ("Q_i[y + 4 * u, t]", "Q_i[t, y + 4 * u]", "correct: Q_i is used across"),
        (
            "Q_i[y + 4 * u, t]\n                k[u] = K_j[x + 4 * u, t]",
            "Q_i[t, y + 4 * u]\n                k[u] = K_j[t, x + 4 * u]",
            "correct: Q_i and K_j are used across",
        ),
        ("for t in range(T):", "for t in range(T - 1):", "correct: ends one step too early"),
        ("for t in range(T):", "for t in range(1):", "correct: Only the first column of each step"),
        (
            "            for u in range(4):\n                for w in range(4):\n                    S_ij[u, w] +=",
            "        for u in range(4):\n                for w in range(4):\n                    S_ij[u, w] +=",
            "correct: the products stand after the loop over t, not in it",
        ),
        ("S_ij[u, w] += q", "S_ij[u, w] = q", "correct: S_ij[u, w] is replaced at each column"),
        (
            "for t in range(T):\n",
            "for t in range(T):\n            if t == 0:\n                for u in range(4):\n"
            "                    for w in range(4):\n                        S_ij[u, w] = float32(0)\n",
            "correct: S_ij begins anew at each step",
        ),
        ("+= q[u] * k[w]", "+= q[u] * k[w] * scale", "correct: It is multiplied by scale twice"),
        ("+= q[u] * k[w]", "+= q[u] + k[w]", "correct: To find it: take one score: S_ij[1, 0]"),
        (
            "q[u] = Q_i[y + 4 * u, t]",
            "q[u] = load_or_zero(Q, i + y + 4 * u, t0 + t)",
            "bill: Q loads|Q_i[y + 4 * u, t]",
        ),
        (
            "k[u] = K_j[x + 4 * u, t]",
            "k[u] = load_or_zero(K, j + x + 4 * u, t0 + t)",
            "bill: K loads|K_j[x + 4 * u, t]",
        ),
        ("range(T):", "range(Q.shape[1]):", "strict: UninitializedRead|T columns, whatever d is: t in range(T)"),
        ("k[u] = K_j[x + 4 * u, t]", "k[u] = K_j[4 * x + 4 * u, t]", "strict: OutOfBounds|one of K_j x + 4 * u"),
        (
            "                k[u] = K_j[x + 4 * u, t]\n",
            "",
            "strict: UninitializedRead|loaded before they are multiplied",
        ),
        (
            "q[u] = Q_i",
            "cuda.syncthreads()\n                Q_i[y, t] = float32(1)\n                q[u] = Q_i",
            "strict: RaceDetected|stores to neither",
        ),
        (
            "range(T):",
            "range(T - x):\n            cuda.syncthreads()",
            "strict: BarrierDivergence|are all that is needed",
        ),
        (
            PRODUCTS,
            DOT_PRODUCTS,
            "parallel: Thread (0, 0) of block (0, 0) does more than its share: 1,088 loads and "
            "stores in shared memory|at most 320 = 10·T·⌈d/T⌉, 8 loads per column|Likely: an element is loaded|"
            "again for each product|Take 4 elements of each tile into registers, then multiply 16 times",
        ),
        (
            PRODUCTS,
            KEYS_AGAIN,
            "parallel: 704 loads|then multiply 16 times",
        ),
        (
            "k[u] = K_j[x + 4 * u, t]",
            "k[u] = K_j[x + 4 * u, t]\n                k[u] = K_j[x + 4 * u, t]",
            "parallel: 448 loads|then multiply 16 times",
        ),
    ],
}
