from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_flash.blocks import TENSOR_CORE_PASSING, choose_blocks
from numba_flash.hbm.ledger import Bill, Count
from numba_flash.hbm.predict import algorithm0, flops, predict
from numba_flash.stages import PORTABLE


class Meter:
    """Counts accesses and operations one by one, as the threads make them."""

    def __init__(self):
        self.kernels, self.flops = {}, 0

    def _count(self, kernel, tensor, loads=0, stores=0):
        tensors = self.kernels.setdefault(kernel, {})
        tensors[tensor] = tensors.get(tensor, Count()) + Count(loads, stores)

    def load(self, kernel, tensor):
        self._count(kernel, tensor, loads=1)

    def store(self, kernel, tensor):
        self._count(kernel, tensor, stores=1)


def run_rows(meter, N, N_k, return_lse):
    """The kernels with one thread a row."""
    for _ in range(N):
        for _ in range(N_k):
            meter.load("softmax", "S")
            meter.flops += 1  # max
        for _ in range(N_k):
            meter.load("softmax", "S")
            meter.flops += 3  # subtract, exp, add
        for _ in range(N_k):
            meter.load("softmax", "S")
            meter.flops += 3  # subtract, exp, divide
            meter.store("softmax", "P")
    for _ in range(N if return_lse else 0):
        for operations in (1, 3):  # max; subtract, exp, add
            for _ in range(N_k):
                meter.load("logsumexp", "S")
                meter.flops += operations
        meter.flops += 2 * (N_k > 0)  # log, add
        meter.store("logsumexp", "L")


def run_naive(N, N_k, d, return_lse):
    meter = Meter()
    for _ in range(N):
        for _ in range(N_k):
            for _ in range(d):
                meter.load("scores", "Q")
                meter.load("scores", "K")
                meter.flops += 2  # multiply, add
            meter.flops += 1  # multiply by the scale
            meter.store("scores", "S")
    run_rows(meter, N, N_k, return_lse)
    for _ in range(N):
        for _ in range(d):
            for _ in range(N_k):
                meter.load("output", "P")
                meter.load("output", "V")
                meter.flops += 2
            meter.store("output", "O")
    return meter


def run_tiled(N, N_k, d, T, return_lse):
    """Every thread of every block: guarded loads into shared tiles, a product over the whole tile, a guarded store."""
    meter = Meter()

    def threads(rows, columns):
        for by in range(0, rows, T):
            for bx in range(0, columns, T):
                for ty in range(T):
                    for tx in range(T):
                        yield by + ty, bx + tx, bx, ty, tx

    for row, column, bx, ty, tx in threads(N, N_k):
        for t0 in range(0, d, T):
            if row < N and t0 + tx < d:
                meter.load("scores", "Q")
            if bx + ty < N_k and t0 + tx < d:
                meter.load("scores", "K")
            for _ in range(T):
                meter.flops += 2
        if row < N and column < N_k:
            meter.flops += 1
            meter.store("scores", "S")
    run_rows(meter, N, N_k, return_lse)
    for row, column, _, ty, tx in threads(N, d):
        for j0 in range(0, N_k, T):
            if row < N and j0 + tx < N_k:
                meter.load("output", "P")
            if j0 + ty < N_k and column < d:
                meter.load("output", "V")
            for _ in range(T):
                meter.flops += 2
        if row < N and column < d:
            meter.store("output", "O")
    return meter


def seen(i, keys, causal):
    """How many keys the queries up to aligned i may see."""
    return max(0, min(i + 1, keys)) if causal else keys


def run_tensor_core(N, N_k, d, Br, Bc, causal, masked):
    """Tile by tile: copies of whole rows as far as there are any; a pair's mask; work on whole tiles."""
    meter = Meter()

    def rows(tensor, count, kind):
        for _ in range(count * d):
            kind("tensor_core", tensor)

    for i0 in range(0, N, Br):
        keys = seen(min(i0 + Br, N) - 1 + N_k - N, N_k, causal)
        rows("Q", min(Br, N - i0), meter.load)
        for j in range(0, keys, Bc):
            rows("K", min(Bc, keys - j), meter.load)
            rows("V", min(Bc, keys - j), meter.load)
            for r in range(Br):
                for c in range(Bc):
                    meter.flops += 4 * d + 5  # two products; scale, max, subtract, exp, sum
                    if masked and j + c < seen(i0 + r + N_k - N, keys, causal):
                        meter.load("tensor_core", "mask")
                meter.flops += d  # O rescaled
                for _ in range(4):  # the threads that share a row
                    meter.flops += 2 + 2 + 1  # max of two others; subtract, exp; l rescaled
        for r in range(Br):
            has_keys = seen(i0 + r + N_k - N, keys, causal) > 0
            meter.flops += 4 * 2 + 4 * has_keys  # two sums by each thread; 1 / l
            if i0 + r < N:
                meter.flops += d + 2 * has_keys  # O / l; log, sum
                meter.store("tensor_core", "L")
        rows("O", min(Br, N - i0), meter.store)
    return meter


def run_hopper(N, N_k, d, Br, Bc, causal, masked):
    """One head: boxes of whole tiles as far as there are rows; each warp of 16 rows asks for the mask of its keys."""
    meter = Meter()

    def rows(tensor, count, kind):
        for _ in range(count * d):
            kind("hopper", tensor)

    for i0 in range(0, N if N_k else 0, Br):
        rows("Q", min(Br, N - i0), meter.load)
        last = min(N_k, i0 + Br + N_k - N) if causal else N_k
        for j in range(max(1, -(-last // Bc))):
            rows("K", min(Bc, N_k - j * Bc), meter.load)
            rows("V", min(Bc, N_k - j * Bc), meter.load)
            for _ in range(Br // 16 if masked else 0):
                for _ in range(min(Bc, N_k - j * Bc)):
                    meter.load("hopper", "mask")
            for _ in range(Br):
                meter.flops += Bc * (4 * d + 5) + d
                meter.flops += 4 * (1 + 2 + 3 + 1)
        for r in range(Br):
            meter.flops += 4 * 3 + d + 4
            if i0 + r < N:
                meter.store("hopper", "L")
        rows("O", min(Br, N - i0), meter.store)
    return meter


def run_tensor_core_backward(N, N_k, d, causal, masked, group):
    """All heads that share one of K: the kernels one after the other, tile by tile, in the tiles of the stage."""
    meter = Meter()
    Br, Bc = choose_blocks("tensor_core", d=d, dtype="float16", direction="backward")
    queries, step = TENSOR_CORE_PASSING[d]

    def rows(kernel, tensors, count, kind, width=d):
        for tensor in tensors:
            for _ in range(count * width):
                kind(kernel, tensor)

    for _ in range(group):
        of_a_block, X = 128 // (d // 8), d // 8
        for _ in range(-(-N // of_a_block) * of_a_block):
            meter.flops += X * {8: 3, 16: 4}[X]  # X threads add 3 or 4 times
        rows("rowsum", ("dO", "O"), N, meter.load)
        meter.flops += 2 * N * d
        rows("rowsum", ("D",), N, meter.store, 1)
    for j in range(0, N_k, Bc):
        own = min(Bc, N_k - j)
        rows("backward_dKdV", ("K", "V"), own, meter.load)
        for _ in range(group):
            for i in range(max(0, j + N - N_k) if causal else 0, N, queries):
                rows("backward_dKdV", ("Q", "dO"), min(queries, N - i), meter.load)
                rows("backward_dKdV", ("L", "D"), min(queries, N - i), meter.load, 1)
                meter.flops += Bc * queries * (8 * d + 5)
        rows("backward_dKdV", ("mask",) if masked else (), own, meter.load, 4)
        rows("backward_dKdV", ("dK", "dV"), own, meter.store)
        meter.flops += 2 * own * d
    for _ in range(group):
        for i0 in range(0, N, Br):
            own = min(Br, N - i0)
            keys = seen(i0 + own - 1 + N_k - N, N_k, causal)
            rows("backward_dQ", ("Q", "dO"), own, meter.load)
            rows("backward_dQ", ("L", "D"), own, meter.load, 4)
            for j in range(0, keys, step):
                rows("backward_dQ", ("K", "V"), min(step, keys - j), meter.load)
                meter.flops += Br * step * (6 * d + 5)
                for r in range(Br if masked else 0):
                    asked = max(0, min(seen(i0 + r + N_k - N, keys, causal), j + step) - j)
                    rows("backward_dQ", ("mask",), asked, meter.load, 1)
            rows("backward_dQ", ("dQ",), own, meter.store)
            meter.flops += own * d
    return meter


def in_halves(meter):
    """What a meter counted, with 2 bytes an element, 1 of a mask and 4 of L and D."""
    sizes = {"mask": 1, "L": 4, "D": 4}
    return {
        kernel: {name: replace(count, itemsize=sizes.get(name, 2)) for name, count in tensors.items()}
        for kernel, tensors in meter.kernels.items()
    }


lengths, columns, sides = st.integers(0, 9), st.integers(1, 6), st.integers(1, 5)
sizes = st.fixed_dictionaries(
    {"n": st.integers(0, 3000), "n_k": st.integers(0, 3000), "d": st.integers(1, 300), "heads": st.integers(1, 8)},
    optional={
        "batch": st.integers(1, 4),
        "return_lse": st.booleans(),
        "dtype": st.sampled_from(["float32", "float64"]),
    },
)
staged = st.one_of(
    st.tuples(st.just("naive"), st.just({})),
    st.tuples(st.just("tiled"), st.fixed_dictionaries({}, optional={"blocks": st.integers(1, 200)})),
)


@settings(deadline=None)
@given(lengths, lengths, columns, st.booleans())
def test_naive_against_a_run_thread_by_thread(N, N_k, d, return_lse):
    meter = run_naive(N, N_k, d, return_lse)
    assert predict("naive", n=N, n_k=N_k, d=d, return_lse=return_lse) == Bill(meter.kernels)
    assert flops("naive", n=N, n_k=N_k, d=d, return_lse=return_lse) == meter.flops


@settings(deadline=None)
@given(lengths, lengths, columns, sides, st.booleans())
def test_tiled_against_a_run_thread_by_thread(N, N_k, d, T, return_lse):
    meter = run_tiled(N, N_k, d, T, return_lse)
    assert predict("tiled", n=N, n_k=N_k, d=d, blocks=T, return_lse=return_lse) == Bill(meter.kernels)
    assert flops("tiled", n=N, n_k=N_k, d=d, blocks=(T, T), return_lse=return_lse) == meter.flops


few = st.integers(0, 50)
of_tensor_cores = given(
    few,
    few,
    st.sampled_from([64, 128]),
    st.sampled_from([16, 32, 48]),
    st.integers(1, 33),
    st.booleans(),
    st.booleans(),
)


@settings(deadline=None, max_examples=50)
@of_tensor_cores
def test_tensor_core_against_a_run_tile_by_tile(N, N_k, d, Br, Bc, causal, masked):
    meter = run_tensor_core(N, N_k, d, Br, Bc, causal, masked)
    how = {"n": N, "n_k": N_k, "d": d, "dtype": "float16", "blocks": (Br, Bc), "causal": causal, "key_mask": masked}
    assert predict("tensor_core", **how).diff(Bill(in_halves(meter))) == []
    assert flops("tensor_core", **how) == meter.flops


@pytest.mark.parametrize("causal, masked", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("N, N_k", [(1, 1), (2, 70), (64, 64), (65, 63), (130, 129), (129, 260), (200, 66), (5, 0)])
@pytest.mark.parametrize("d, group", [(64, 1), (128, 2)])
def test_tensor_core_backward_against_a_run_tile_by_tile(N, N_k, d, group, causal, masked):
    meter = run_tensor_core_backward(N, N_k, d, causal, masked, group)
    how = {"n": N, "n_k": N_k, "d": d, "dtype": "float16", "causal": causal, "key_mask": masked}
    how |= {"heads": group, "kv_heads": 1, "direction": "backward"}
    assert predict("tensor_core", **how).diff(Bill(in_halves(meter))) == []
    assert flops("tensor_core", **how) == meter.flops
    both = predict("tensor_core", **how | {"direction": "both"})
    assert both == predict("tensor_core", **how | {"direction": "forward"}) + predict("tensor_core", **how)


@settings(deadline=None, max_examples=50)
@of_tensor_cores
def test_hopper_against_a_run_tile_by_tile(N, N_k, d, Br, Bc, causal, masked):
    meter = run_hopper(N, N_k, d, Br, Bc, causal, masked)
    kernels = in_halves(meter)
    if kernels:
        kernels["hopper"]["queue"] = Count(stores=1, atomics=-(-N // Br), itemsize=4)
    how = {"n": N, "n_k": N_k, "d": d, "dtype": "bfloat16", "blocks": (Br, Bc), "causal": causal, "key_mask": masked}
    assert predict("hopper", **how).diff(Bill(kernels)) == []
    assert flops("hopper", **how) == meter.flops


@pytest.mark.parametrize("stage", ["tensor_core", "hopper"])
def test_heads_of_halves_add_but_for_the_queue(stage):
    how = {"n": 300, "n_k": 200, "d": 64, "dtype": "float16", "key_mask": True, "causal": True}
    one, many = predict(stage, **how), predict(stage, **how, heads=4, kv_heads=2, batch=3)
    for tensor in ("Q", "K", "V", "mask", "O", "L"):
        assert many[tensor] == one.scaled(12)[tensor]
    assert flops(stage, **how, heads=4, batch=3) == 12 * flops(stage, **how)
    if stage == "hopper":
        assert (many["queue"].stores, many["queue"].atomics) == (1, 12 * one["queue"].atomics)


def test_halves_of_the_bytes_at_equal_tiles():
    """Of what flash2 moves in float32 in the same tiles, tensor_core moves half, and L as it is."""
    single = predict("flash2", n=1024, d=64, blocks=(128, 64))
    halves = predict("tensor_core", n=1024, d=64, blocks=(128, 64), dtype="float16")
    assert halves.loads == single.loads and halves.stores == single.stores
    assert halves["K"].read_bytes * 2 == single["K"].read_bytes
    assert halves["L"].write_bytes == single["L"].write_bytes == 4 * 1024


@pytest.mark.parametrize(
    "stage, more, message",
    [
        (
            "hopper",
            {},
            "dtype='float32': stage 'hopper' takes float16 and bfloat16; pass dtype='float16', or another .*",
        ),
        ("flash2", {"dtype": "float16"}, "dtype='float16': stage 'flash2' takes float32 and float64; pass dtype=.*"),
        ("hopper", {"dtype": "float16", "d": 96}, "d=96: stage 'hopper' takes d = 64 and 128; .*"),
        ("tensor_core", {"dtype": "float16", "dropout_p": 0.1}, "dropout_p=0.1: stage 'tensor_core' drops nothing; .*"),
        (
            "tensor_core",
            {"dtype": "float16", "split_kv": 2},
            "split_kv=2: stage 'tensor_core' does not split the keys; .*",
        ),
        (
            "hopper",
            {"dtype": "float16", "deterministic": False},
            "deterministic=False: stage 'hopper' has no variant .*",
        ),
        ("hopper", {"dtype": "float8"}, "dtype='float8' is not one the stages compute in: pass 'float16', .*"),
    ],
)
def test_what_a_stage_does_not_take(stage, more, message):
    for what in (predict, flops):
        with pytest.raises(ValueError, match=message):
            what(stage, **{"n": 10, "d": 64} | more)


def test_the_yardstick_in_halves():
    assert algorithm0(n=100, d=64, dtype="float16").total_bytes * 2 == algorithm0(n=100, d=64).total_bytes


def test_the_figures_of_lesson_03():
    bill = predict("tiled", n=1024, d=64, blocks=16)
    assert {k: {t: c.elements for t, c in tensors.items()} for k, tensors in bill.kernels.items()} == {
        "scores": {"Q": 4_194_304, "K": 4_194_304, "S": 1_048_576},
        "softmax": {"S": 3_145_728, "P": 1_048_576},
        "output": {"P": 4_194_304, "V": 4_194_304, "O": 65_536},
    }
    assert bill.elements == 22_085_632
    assert bill.total_bytes == 88_342_528
    assert bill == predict("tiled", n=1024, d=64)
    assert algorithm0(n=1024, d=64).elements == 4_456_448
    assert predict("naive", n=1024, d=64).kernels["scores"]["Q"].loads == 1024 * 1024 * 64


@given(sizes, staged, st.integers(1, 5))
def test_heads_and_batches_add(size, stage, more):
    stage, blocks = stage
    size = size | blocks
    one = predict(stage, **size | {"heads": 1, "batch": 1})
    H = size["heads"] * size.get("batch", 1)
    assert predict(stage, **size) == one.scaled(H)
    assert predict(stage, **size | {"heads": size["heads"] + more}) == predict(stage, **size) + predict(
        stage, **size | {"heads": more}
    )
    assert flops(stage, **size) == H * flops(stage, **size | {"heads": 1, "batch": 1})


@given(sizes, staged, st.sampled_from(["n", "n_k", "d", "heads"]), st.integers(1, 50))
def test_more_of_anything_costs_no_less(size, stage, which, more):
    stage, blocks = stage
    size = size | blocks
    larger = size | {which: size[which] + more}
    assert predict(stage, **larger).elements >= predict(stage, **size).elements
    assert flops(stage, **larger) >= flops(stage, **size)


@given(sizes, st.integers(1, 100), st.integers(0, 100))
def test_larger_tiles_load_no_more(size, T, more):
    assert predict("tiled", **size, blocks=T + more).loads <= predict("tiled", **size, blocks=T).loads
    assert predict("tiled", **size, blocks=T).elements <= predict("naive", **size).elements


@given(sizes)
def test_a_tile_of_one_is_naive(size):
    assert predict("tiled", **size, blocks=1) == predict("naive", **size)
    assert flops("tiled", **size, blocks=1) == flops("naive", **size)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 300), st.integers(1, 8), st.integers(1, 8))
def test_algorithm0_is_the_least(N, N_k, d, heads, batch):
    bill = algorithm0(n=N, n_k=N_k, d=d, heads=heads, batch=batch)
    assert bill.elements == heads * batch * (4 * N * N_k + 2 * N * d + 2 * N_k * d)
    for stage in ("naive", "tiled"):
        assert bill.elements <= predict(stage, n=N, n_k=N_k, d=d, heads=heads, batch=batch).elements


@pytest.mark.parametrize("stage", ["naive", "tiled"])
def test_zero_lengths(stage):
    assert predict(stage, n=0, n_k=7, d=3, return_lse=True) == Bill() == algorithm0(n=0, n_k=7, d=3)
    no_keys = Bill({"output": {"O": Count(stores=15)}, "logsumexp": {"L": Count(stores=5)}})
    assert predict(stage, n=5, n_k=0, d=3, return_lse=True) == no_keys
    assert algorithm0(n=5, n_k=0, d=3)["O"] == no_keys["O"]
    assert flops(stage, n=5, n_k=0, d=3, return_lse=True) == 0


def test_integers_of_any_size_and_kind():
    assert predict("naive", n=2**40, d=2**10)["Q"].loads == 2**90
    for stage in PORTABLE:  # without a loop over tiles
        assert flops(stage, n=2**40, d=64, direction="both") > 2**86
    small = predict(
        "tiled", n=np.int8(100), d=np.uint8(64), blocks=np.int64(16), heads=np.int32(3), return_lse=np.True_
    )
    assert small == predict("tiled", n=100, d=64, blocks=(16, 16), heads=3, return_lse=True)
    assert type(small.loads) is int


def test_key_heads_change_nothing_that_naive_and_tiled_request():
    for stage in ("naive", "tiled"):
        assert predict(stage, n=9, d=5, heads=4, kv_heads=2) == predict(stage, n=9, d=5, heads=4)


@pytest.mark.parametrize("dtype", ["float64", np.float64, np.dtype("float64"), float])
def test_dtypes(dtype):
    bill = predict("naive", n=4, d=2, dtype=dtype)
    assert bill["Q"].itemsize == 8
    assert bill.total_bytes == 2 * predict("naive", n=4, d=2).total_bytes
    assert bill != predict("naive", n=4, d=2)


@pytest.mark.parametrize(
    ("argument", "error", "says"),
    [
        ({"n": -1}, ValueError, "n=-1 .* 0 or more"),
        ({"n": 1024.0}, TypeError, "n=1024.0 .* int"),
        ({"n": True}, TypeError, "n=True .* int"),
        ({"n": None}, TypeError, "n=None"),
        ({"n_k": -3}, ValueError, "n_k=-3"),
        ({"d": 0}, ValueError, "d=0 .* 1 or more"),
        ({"d": "64"}, TypeError, "d='64'"),
        ({"heads": 0}, ValueError, "heads=0"),
        ({"batch": 0}, ValueError, "batch=0"),
        ({"kv_heads": 0}, ValueError, "kv_heads=0"),
        ({"heads": 4, "kv_heads": 3}, ValueError, "heads=4 .* kv_heads=3"),
        ({"heads": 2, "kv_heads": 4}, ValueError, "heads=2 .* kv_heads=4"),
        ({"stage": "tield"}, ValueError, "stage='tield' .*'naive', 'tiled'.*did you mean 'tiled'"),
        ({"stage": "Naive"}, ValueError, "did you mean 'naive'"),
        ({"stage": "xyz"}, ValueError, "stage='xyz' is unknown: use one of 'naive', 'tiled'"),
        ({"stage": None}, TypeError, "stage=None .* 'naive', 'tiled'"),
        ({"dtype": "float16"}, ValueError, "dtype='float16': .* takes float32 and float64"),
        ({"dtype": int}, ValueError, "dtype=<class 'int'>"),
        ({"dtype": None}, ValueError, "dtype=None"),
        ({"dtype": "real"}, ValueError, "dtype='real'"),
        ({"stage": "naive", "blocks": 16}, ValueError, "blocks=16: .*'naive' has no tiles"),
        ({"blocks": 0}, ValueError, "blocks=0"),
        ({"blocks": (16, 0)}, ValueError, r"blocks=\(16, 0\): side=0"),
        ({"blocks": 16.0}, TypeError, "blocks=16.0"),
        ({"blocks": False}, TypeError, "blocks=False"),
        ({"blocks": "16"}, ValueError, "blocks='16'"),
        ({"blocks": ()}, ValueError, r"blocks=\(\)"),
        ({"blocks": (16,)}, ValueError, r"blocks=\(16,\)"),
        ({"blocks": (16, 16, 16)}, ValueError, r"blocks=\(16, 16, 16\)"),
        ({"blocks": (16, 8)}, ValueError, r"blocks=\(16, 8\).* square"),
        ({"direction": "backwards"}, ValueError, "direction='backwards' .* 'forward', 'backward', 'both'"),
        ({"direction": np.array(["a", "b"])}, ValueError, "direction=array"),
        ({"deterministic": 0}, TypeError, "deterministic=0"),
        ({"deterministic": False}, ValueError, "deterministic=False: stage 'tiled' .* stage='flash2'"),
        ({"return_lse": "yes"}, TypeError, "return_lse='yes'"),
    ],
)
def test_arguments_without_a_meaning(argument, error, says):
    arguments = {"stage": "tiled", "n": 8, "d": 4} | argument
    for function in (predict, flops):
        with pytest.raises(error, match=says):
            function(**arguments)
