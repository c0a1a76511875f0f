"""`flops` equals the operations of the unmodified kernels, run on numbers that count what is done to them.

In Numba's simulator a kernel is plain Python, so `real` may be any class: here one that counts each sum, difference,
product, quotient, exp, log and max.
"""

import json
import os
import subprocess
import sys

SCRIPT = """
import dataclasses, importlib, json, math, types
import numpy as np
import numba_flash as nf
from numba_flash import masks

count = 0

class Number(float):
    pass

def counted(operation):
    def method(self, other):
        global count
        assert type(other) is Number, f"{other!r} is no number of the kernel's dtype"
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

class Atomic:
    def add(array, index, value):
        array[index] += value

fake = types.SimpleNamespace(exp=once(math.exp), log=once(math.log), inf=math.inf)

def flops(stage, N, N_k, d, **how):
    return nf.flops(stage, n=N, n_k=N_k, d=d, heads=2, kv_heads=1, **how)

masks.math = fake
report = {}
SIZES = (5, 7, 3, (4, 4)), (4, 4, 4, (4, 4)), (1, 3, 2, (2, 2)), (3, 0, 2, (2, 2)), (7, 9, 3, (4, 2)), (9, 5, 2, (4, 3))
backward = [f"{name}_backward" for name in (*nf.STAGES, "flash2_atomic")]
for stage in nf.STAGES:
    module = importlib.import_module(f"numba_flash.stages.{stage}")
    for file in ("", *nf.STAGES, *backward):
        other = importlib.import_module(f"numba_flash.stages.{file}".rstrip("."))
        other.math, other.max = fake, once(max)
        other.numba_type = lambda dtype: Number
        other.empty = lambda shape, dtype, device=None: np.full(shape, Number("nan"), object)
        other.launch = lambda kernel, grid, block, *args, device=None: kernel[grid, block](*args)
        other.fitting_blocks = lambda stage, tiles, d, dtype, direction=None: blocks
    for N, N_k, d, blocks in SIZES:
        if stage in ("tiled", "online_softmax"):
            blocks = blocks[:1] * 2
        rng = np.random.default_rng(0)
        numbers = np.vectorize(Number, otypes=[object])
        Q = numbers(rng.standard_normal((2, N, d)))
        K, V = (numbers(x) if N_k else x.astype(object) for x in rng.standard_normal((2, 1, N_k, d)))
        for causal in (False, True):
            mask = dataclasses.replace(masks.no_mask(), causal=causal)
            how = {"mask": mask, "blocks": blocks}
            asked = {"causal": causal, "blocks": None if stage == "naive" else blocks}
            name = f"{stage} N={N} N_k={N_k} d={d} causal={causal}"
            for lse in (False, True):
                count = 0
                O, L = module.forward(Q, K, V, Number(0.5), return_lse=lse, **how)
                report[f"{name} lse={lse}"] = [count, flops(stage, N, N_k, d, return_lse=lse, **asked)]
            dO = numbers(rng.standard_normal((2, N, d)))
            for atomic in ((False, True) if stage == "flash2" else (False,)):
                run = nf.STAGES[stage].backward_atomic if atomic else nf.STAGES[stage].backward
                for direction, kept in (("both", {}), ("backward", {"O": O, "L": L})):
                    count = 0
                    run(Q, K, V, dO, Number(0.5), **kept, **how)
                    want = flops(stage, N, N_k, d, direction=direction, deterministic=not atomic, **asked)
                    if direction == "both" and stage.startswith("flash"):  # the forward pass ran in these tiles too
                        want += flops(stage, N, N_k, d, **asked) - flops(stage, N, N_k, d, causal=causal)
                    report[f"{name} {direction} {atomic}"] = [count, want]
print(json.dumps(report))
"""


def test_flops_are_what_the_kernels_do():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": root, "NUMBA_FLASH_DEVICE": ""}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert len(report) >= 200
    assert {name: pair for name, pair in report.items() if pair[0] != pair[1]} == {}
