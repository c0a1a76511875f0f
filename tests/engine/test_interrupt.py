"""Ctrl-C takes effect within half a second, wherever the kernel is; the process goes on afterwards."""

import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import sys, threading, time, os, signal
import numpy as np, numba_flash as nf
from tests.engine import error_kernels as kernels, feature_kernels
kernel, grid, block = {launch}
A = np.zeros(8)
nf.launch(feature_kernels.fences, 1, 2, np.zeros(2), device="cpu")   # the engine is warm
from numba_flash.engine import cpu
original = cpu.execute
def execute(*args):                                                  # interrupt while it runs, not while it compiles
    threading.Timer(0.3, lambda: (times.append(time.perf_counter()), os.kill(os.getpid(), signal.SIGINT))).start()
    return original(*args)
times = []
cpu.execute = execute
try:
    nf.launch(kernel, grid, block, A, device="cpu")
    print("finished")
except KeyboardInterrupt:
    print(time.perf_counter() - times[0])
cpu.execute = original
B = np.zeros(2)
nf.launch(feature_kernels.fences, 1, 2, B, device="cpu")
assert list(B) == [1, 2]
"""

COMPILING = """
import sys, threading, time, os, signal
import numpy as np, numba_flash as nf
from tests.engine import feature_kernels as kernels
from numba_flash.engine import cpu
original = cpu.build
def build(*args):
    threading.Timer({delay}, lambda: (times.append(time.perf_counter()), os.kill(os.getpid(), signal.SIGINT))).start()
    cpu.build = original
    return original(*args)
times = []
cpu.build = build
A, B = np.ones((3, 64), np.float32), np.zeros(3, np.float32)
try:
    nf.launch(kernels.make_block_sums(64), 1, 64, A, B, device="cpu")
    print("finished")
except KeyboardInterrupt:
    print(time.perf_counter() - times[0])
nf.launch(kernels.make_block_sums(64), 1, 64, A, B, device="cpu")
assert list(B) == [64, 64, 64], B
"""

LAUNCHES = {
    "while": "kernels.forever, 1, 1",
    "one loop": "kernels.one_long_loop, 1, 1",
    "nested loops": "kernels.long_loops, 1, 1",
    "blocks": "kernels.many_blocks, 10**8, 1",
    "barriers": "kernels.make_long_barriers(64), 1, 64",
}


def seconds_until_stopped(script, **environment):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"PYTHONPATH": root} | environment
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return float(done.stdout)


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill cannot send Ctrl-C to itself on Windows")
@pytest.mark.parametrize("where", LAUNCHES)
def test_an_interrupt_takes_effect(where):
    assert seconds_until_stopped(textwrap.dedent(SCRIPT).replace("{launch}", LAUNCHES[where])) < 0.5


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill cannot send Ctrl-C to itself on Windows")
@pytest.mark.parametrize("delay", [0.02, 0.2, 0.4])
def test_an_interrupt_takes_effect_while_compiling(delay, tmp_path):
    script = textwrap.dedent(COMPILING).replace("{delay}", str(delay))
    assert seconds_until_stopped(script, NUMBA_FLASH_CACHE_DIR=str(tmp_path)) < 0.5
