"""How fast the compiled CPU engine is, against NumPy and against Numba's simulator."""

import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numba
import numpy as np

from .. import report
from ..attention import attention
from ..errors import KernelError
from ..hbm.ledger import ledger
from ..hbm.predict import predict
from ..stages import PORTABLE
from ..testing import inputs
from ..timing import interleaved, spread, wall_seconds
from .gpu import refuse_if_too_large

N, SIMULATOR_N = 1024, 256


def run(n=None, d=64, repeats=5, simulator=True):
    """Measure all that this machine can -> figures, seconds everywhere; "simulator" is None where it is left out.

    Each time is the median of `repeats` runs after one that compiles. n: by default 1024; the simulator runs at 256 or
    n, whichever is less, and once.
    """
    q, k, v = inputs((n or N, d), (n or N, d))
    refuse_if_too_large(lambda n: 3 * 4 * n**2, n or N, "attention in NumPy")
    with report.progress("NumPy and the CPU engine", len(PORTABLE) + 1) as advance:
        numpy_seconds = median_seconds(lambda: numpy_attention(q, k, v), repeats)
        advance()
        cpu = {}
        for stage in PORTABLE:
            cpu[stage] = on_cpu(stage, q, k, v, repeats)
            cpu[stage]["times_numpy"] = cpu[stage]["seconds"] / numpy_seconds
            advance()
    versions = {"python": platform.python_version(), "numba": numba.__version__, "numpy": np.__version__}
    return {
        "device": "cpu",
        "n": n or N,
        "d": d,
        "heads": 1,
        "dtype": "float32",
        "repeats": repeats,
        "cores": os.cpu_count(),
        "versions": versions,
        "numpy": {"seconds": numpy_seconds},
        "cpu": cpu,
        "simulator": against_simulator(min(n or N, SIMULATOR_N), d, repeats) if simulator else None,
    }


def median_seconds(work, repeats):
    """The median time of `work()`, after one call that is not timed."""
    return spread(interleaved({"": work}, repeats, wall_seconds)[""])["median"]


def numpy_attention(q, k, v):
    """Attention in the dtype of its input, the whole matrix S at once."""
    S = q @ k.T * q.dtype.type(1 / math.sqrt(q.shape[-1]))
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    return P / P.sum(axis=-1, keepdims=True) @ v


def on_cpu(stage, q, k, v, repeats):
    """A stage on the CPU engine, counted and checked, and whether its bill was the predicted one."""
    bills = []

    def work():
        with ledger() as bill:
            attention(q, k, v, stage=stage, device="cpu")
        bills.append(bill)

    seconds = median_seconds(work, repeats)
    predicted = predict(stage, n=q.shape[0], d=q.shape[1])
    return {"seconds": seconds, "equal": all(bill == predicted for bill in bills)}


# --- Numba's simulator ------------------------------------------------------------------------------------------------


def against_simulator(n, d, repeats):
    """The stage naive on Numba's own simulator, in a process that has it, and on the CPU engine."""
    package = Path(__file__).resolve().parent.parent
    paths = filter(None, (str(package.parent), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("NUMBA_FLASH_DEVICE", None)
    command = [sys.executable, "-c", f"from numba_flash.bench import cpu; print(cpu.simulated_seconds({n}, {d}))"]
    with report.progress(f"naive on Numba's simulator, N = {n}"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise KernelError(f"Numba's simulator failed: {''.join(last)}; --skip-simulator leaves it out")
    seconds, engine = float(done.stdout), on_cpu("naive", *inputs((n, d), (n, d)), repeats)["seconds"]
    return {"n": n, "seconds": seconds, "engine_seconds": engine, "times_faster": seconds / engine}


def simulated_seconds(n, d):
    """Time of the stage naive as Numba's simulator runs it, nothing counted. For a process of its own."""
    from ..stages import naive

    naive.launch = lambda kernel, grid, block, *args, device=None: kernel[grid, block](*args)
    Q, K, V = (x[None] for x in inputs((n, d), (n, d)))
    begin = time.perf_counter()
    naive.forward(Q, K, V, np.float32(1 / math.sqrt(d)))
    return time.perf_counter() - begin


# --- what is printed --------------------------------------------------------------------------------------------------


def page(figures):
    """The figures as report prints them."""
    numpy_seconds = figures["numpy"]["seconds"]
    rows = [[stage, cpu["seconds"], numpy_seconds, cpu["times_numpy"]] for stage, cpu in figures["cpu"].items()]
    yield report.heading("Bench", f"N = {figures['n']:,}, d = {figures['d']}, float32, 1 head")
    yield ""
    yield report.table(["stage", "CPU engine, s", "NumPy, s", "times NumPy's time"], rows)
    yield ""
    wrong = [stage for stage, cpu in figures["cpu"].items() if not cpu["equal"]]
    bills = f"PREDICTED AND COUNTED DIFFER: {', '.join(wrong)}" if wrong else "every bill as predicted"
    yield report.prose(
        f"Each is the median of {figures['repeats']}, compiled, counted and checked; {bills}. The engine takes the "
        "threads one after the other: its time says nothing about a GPU."
    )
    if sim := figures["simulator"]:
        yield report.table(
            [f"naive, N = {sim['n']}", "seconds"],
            [["Numba's simulator", sim["seconds"]], ["CPU engine", sim["engine_seconds"]]],
        )
        yield ""
        yield report.prose(f"The CPU engine is {sim['times_faster']:,.0f} times as fast as the simulator.")
    yield report.prose(
        "On a GPU, this command times all stages, forward, backward and decoding, beside torch's "
        "scaled_dot_product_attention, and what counting costs. `python -m numba_flash doctor` says what is missing."
    )
