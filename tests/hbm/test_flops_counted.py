"""`flops` equals the operations of the unmodified kernels, run on numbers that count what is done to them.

In Numba's simulator a kernel is plain Python, so `real` may be any class: here one that counts each sum, difference,
product, quotient, exp, log and max.
"""

import json
import os
import subprocess
import sys

SCRIPT = """
import importlib, json, math, types
import numpy as np
import numba_flash as nf

count = 0

class Number(float):
    pass

def counted(operation):
    def method(self, other):
        global count
        count += 1
        return Number(operation(float(self), float(other)))
    return method

for name in ("add", "sub", "mul", "truediv"):
    operation = getattr(float, f"__{name}__")
    setattr(Number, f"__{name}__", counted(operation))
    setattr(Number, f"__r{name}__", counted(lambda a, b, operation=operation: operation(b, a)))

def once(function):
    def call(*args):
        global count
        count += 1
        return Number(function(*args))
    return call

fake = types.SimpleNamespace(exp=once(math.exp), log=once(math.log), inf=math.inf)

report = {}
for stage in nf.STAGES:
    module = importlib.import_module(f"numba_flash.stages.{stage}")
    for file in nf.STAGES:
        other = importlib.import_module(f"numba_flash.stages.{file}")
        other.math, other.max = fake, once(max)
        other.numba_type = lambda dtype: Number
        other.empty = lambda shape, dtype, device=None: np.full(shape, Number("nan"), object)
        other.launch = lambda kernel, grid, block, *args, device=None: kernel[grid, block](*args)
        other.fitting_blocks = lambda stage, blocks, d, dtype: blocks
    for N, N_k, d, blocks in ((5, 7, 3, (4, 4)), (4, 4, 4, (4, 4)), (1, 3, 2, (2, 2)), (3, 0, 2, (2, 2))):
        rng = np.random.default_rng(0)
        numbers = np.vectorize(Number, otypes=[object])
        Q = numbers(rng.standard_normal((1, N, d)))
        K, V = (numbers(x) if N_k else x.astype(object) for x in rng.standard_normal((2, 1, N_k, d)))
        for lse in (False, True):
            count = 0
            module.forward(Q, K, V, Number(0.5), blocks=blocks, return_lse=lse)
            sides = None if stage == "naive" else blocks
            want = nf.flops(stage, n=N, n_k=N_k, d=d, blocks=sides, return_lse=lse)
            report[f"{stage} N={N} N_k={N_k} d={d} lse={lse}"] = [count, want]
print(json.dumps(report))
"""


def test_flops_are_what_the_kernels_do():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": root, "NUMBA_FLASH_DEVICE": ""}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert len(report) >= 16
    assert {name: pair for name, pair in report.items() if pair[0] != pair[1]} == {}
