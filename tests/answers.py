"""The answers to the questions of the lessons, found in another way: by counting a run, or one access after another."""

import itertools
import math

import numpy as np
from numba import cuda, float32

import numba_flash as nf
from numba_flash.hbm.predict import algorithm0
from numba_flash.hbm.warps import warp_accesses


class Operation(float):
    """A number that counts what is computed with it."""

    done = 0

    def _counted(name):
        def operation(self, *others):
            Operation.done += 1
            return Operation(getattr(float, name)(self, *others))

        return operation

    __add__, __sub__, __mul__, __truediv__ = map(_counted, ("__add__", "__sub__", "__mul__", "__truediv__"))

    def exp(self):
        Operation.done += 1
        return Operation(math.exp(self))

    def larger(self, other):
        Operation.done += 1
        return Operation(max(self, other))


def operations(of):
    Operation.done = 0
    of()
    return Operation.done


def counted(of, heads, n, d, n_k=None, gradients=False, **how):
    """The ledger's bill of a run."""
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((heads, rows, d)).astype(np.float32) for rows in (n, n_k or n, n_k or n))
    with nf.ledger() as bill:
        if gradients:
            nf.attention_backward(q, k, v, q, stage=of, device="cpu", **how)
        else:
            nf.attention(q, k, v, stage=of, device="cpu", **how)
    return bill


def launched(N, B):
    """(block, thread, element or None) of each thread that starts."""
    blocks = 0
    while blocks * B < N:
        blocks += 1
    return [(b, t, b * B + t if b * B + t < N else None) for b in range(blocks) for t in range(B)]


def smooth_shared(N, B):
    loads = [i for _, _, i in launched(N, B) if i is not None]
    for b in {block for block, _, _ in launched(N, B)}:
        loads += [i for i in (b * B - 1, b * B + B) if 0 <= i < N]
    return len(loads)


def flops(N, d, H):
    number = Operation(1.5)

    def score():
        total = Operation(0)
        for _ in range(d):
            total = total + number * number
        return total * number

    def row():
        m, l = number, Operation(0)
        for _ in range(N):
            m = m.larger(number)
        for _ in range(N):
            l = l + (number - m).exp()
        return [(number - m).exp() / l for _ in range(N)]

    def output():
        total = Operation(0)
        for _ in range(N):
            total = total + number * number
        return total

    return H * (N * N * operations(score) + N * operations(row) + N * d * operations(output))


def ideal(N, d, H):
    shape = {**dict.fromkeys("QKVO", (N, d)), **dict.fromkeys("SP", (N, N))}
    steps = ("QK", "S"), ("S", "P"), ("PV", "O")
    return H * sum(math.prod(shape[tensor]) for step in steps for part in step for tensor in part)


def shared_memory(d, Br):
    """The fewest bytes with which flash wins, by the closed form, for a row so long that tiles fit evenly enough."""
    n, M = 10**7, 1
    while (
        nf.predict("flash", n=n, d=d, blocks=(Br, max(M // (2 * d + Br), 1))).elements > algorithm0(n=n, d=d).elements
    ):
        M += 16
    return 4 * M


def recomputing(N, d):
    """FLOPs of the products of Algorithm 4 for one head, tile by tile."""
    Br, Bc, total = 20, 10, 0

    def product(a, b):
        nonlocal total
        (rows, inner), (_, columns) = a, b
        total += rows * columns * 2 * inner
        return rows, columns

    for _ in range(0, N, Bc):
        for _ in range(0, N, Br):
            S = product((Br, d), (d, Bc))
            product(S[::-1], (Br, d))
            dS = product((Br, d), (d, Bc))
            product(dS, (Bc, d))
            product(dS[::-1], (Br, d))
    return total


def weights(p, n, k):
    P = np.full(n, 1 / n)
    P[:k] = 0
    return (P / (1 - p)).sum()


def filled(Tc, n):
    each, left, splits = math.ceil(Tc / n), Tc, 0
    while left > 0:
        left, splits = left - each, splits + 1
    return splits


def with_dropout(N, H):
    with_, without = (counted("naive", H, N, 16, gradients=True, dropout_p=p) for p in (0.5, 0.0))
    return with_.total_bytes - without.total_bytes


def of_dQ(N, d, Tc, H):
    keys = next(keys for keys in range(1, N + 1) if len(range(0, N, keys)) == Tc)
    return nf.predict("flash", n=N, d=d, heads=H, direction="backward", blocks=(8, keys))["dQ"].elements


def local(Tr, Br, d, H):
    n, sides = Tr * Br, (Br, Br)
    near = np.abs(np.subtract.outer(np.arange(Tr), np.arange(Tr))) <= 1
    return counted("flash2", H, n, d, block_mask=near, blocks=sides)


def splits(N_k, d, n, H):
    alone, shared = (counted("flash2", H, 1, d, N_k, **how) for how in ({}, {"split_kv": n}))
    return shared.elements - alone.elements


def sectors(s, B):
    return sum(len({s * i * 4 // 32 for i in range(warp, warp + 32)}) for warp in range(0, B, 32))


def wavefronts(width):
    """Of column 0 of 32 rows: the most that one bank has to serve."""
    banks = [row * width % 32 for row in range(32)]
    return max(map(banks.count, banks))


def loads_of_a_thread(R, C, d):
    """What register_tiled's own product loads, in a recording of one thread."""

    @cuda.jit
    def products(A, B, S):
        a, b = cuda.shared.array((8, 48), float32), cuda.shared.array((8, 48), float32)
        for r in range(8):
            for t in range(d):
                a[r, t], b[r, t] = A[r, t], B[r, t]
        for t in range(d):
            for r in range(R):
                x = a[r, t]
                S[r, 0] += x
            for c in range(C):
                y = b[c, t]
                S[c, 1] += y

    with nf.recording() as record:
        nf.launch(products, 1, 1, *(np.ones((8, 48), np.float32) for _ in "ABS"), device="cpu")
    found = warp_accesses(record.launches[0])
    return sum(one.elements for one in found if (one.space, one.kind) == ("shared", "loads"))


def outgrown(B):
    return next(N for N in itertools.count(1) if B * N * N * np.float32().nbytes > 60 * 2**20)


def least(N, d, H):
    kept = [np.empty((H, N, d), np.float32) for _ in "QKVO"] + [np.empty((H, N), np.float32)]
    return sum(tensor.nbytes for tensor in kept)


def bar(N, d, Bc):
    """All that the kernel of flash moves, less what the paper leaves out."""
    flash = counted("flash", 1, N, d, blocks=(8, Bc)).kernels["flash"]
    return sum(count.elements for tensor, count in flash.items() if tensor not in "lm") - N * d


ANSWERS = {
    "00": {
        "threads": lambda N, B: len(launched(N, B)),
        "scale": lambda N, B: sum(2 for *_, i in launched(N, B) if i is not None),
        "row_sum": lambda H, N, d: np.ones((H, N, d)).size + np.ones((H, N)).size,
        "smooth": lambda N: sum(0 <= i + side < N for i in range(N) for side in (-1, 0, 1)),
        "smooth_shared": smooth_shared,
    },
    "01": {"FLOPs": flops, "Algorithm 0": ideal},
    "02": {
        "Q loads": lambda N, d, H: counted("naive", H, N, d)["Q"].loads,
        "S": lambda N, d, H: counted("naive", H, N, d)["S"].elements,
    },
    "03": {
        "Q loads": lambda N, d, T, H: counted("tiled", H, N, d, blocks=T)["Q"].loads,
        "P loads": lambda N, d, T, H: counted("tiled", H, N, d, blocks=T)["P"].loads,
    },
    "04": {
        "l": lambda m, l, s, t: (l * math.exp(m) + math.exp(m + t) + math.exp(m + t - s)) / math.exp(m + t),
        "S loads": lambda N, d, T, H: counted("online_softmax", H, N, d, blocks=T)["S"].loads,
        "m loads": lambda N, d, T, H: counted("online_softmax", H, N, d, blocks=T)["m"].loads,
    },
    "05": {
        "O loads": lambda N, d, Br, Bc, H: counted("flash", H, N, d, blocks=(Br, Bc))["O"].loads,
        "l, m": lambda N, d, Br, Bc, H: sum(counted("flash", H, N, d, blocks=(Br, Bc))[x].elements for x in "lm"),
        "K, V loads": lambda N, d, Br, Bc, H: sum(counted("flash2", H, N, d, blocks=(Br, Bc))[x].loads for x in "KV"),
    },
    "06": {"flash2": lambda N, d, Br, H: counted("flash2", H, N, d, blocks=(Br, 16)).elements, "M": shared_memory},
    "07": {
        "products": lambda N, d, Tc, H: H * recomputing(N, d),
        "dQ": of_dQ,
        "kept": lambda N, H, b: np.broadcast_to(np.float16(0), (b, H, N, N)).nbytes,
    },
    "08": {
        "causal": lambda N, N_k, i: sum(j - i <= N_k - N for j in range(N_k)),
        "K loads": lambda Tr, Br, d, H: counted("flash2", H, Tr * Br, d, causal=True, blocks=(Br, Br))["K"].loads,
    },
    "09": {"sum": weights, "bytes": with_dropout},
    "10": {
        "K loads": lambda **sizes: local(**sizes)["K"].loads,
        "mask": lambda **sizes: local(**sizes)["block_mask"].read_bytes,
    },
    "11": {"more": splits, "filled": filled},
    "12": {"sectors": sectors, "wavefronts": wavefronts, "loads": loads_of_a_thread},
    "13": {"L2": outgrown, "least": least, "bar": bar},
}
NEAR = {("06", "M"): 0.08, ("04", "l"): 1e-12, ("09", "sum"): 1e-12}  # where the other way rounds


def check(run):
    """Hold each question of a run, as --answers writes it, against the other way."""
    ways = ANSWERS[run["lesson"]]
    assert [question["name"] for question in run["questions"]] == list(ways)
    for question in run["questions"]:
        right, name = ways[question["name"]](**question["sizes"]), question["name"]
        assert abs(question["right"] - right) <= NEAR.get((run["lesson"], name), 0) * right, question
        others = [float(value) for value in question["wrong"]]
        assert len(others) >= 2 and question["right"] not in others, question
