import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_flash.hbm.ledger import Bill, Count
from numba_flash.hbm.predict import algorithm0, flops, predict
from numba_flash.stages import STAGES


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
    for stage in STAGES:  # without a loop over tiles
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
        ({"dtype": "float16"}, ValueError, "dtype='float16' .* 'float32' or 'float64'"),
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
