"""The CPU engine gives what Numba's own simulator gives: the feature kernels bit for bit, the stages up to rounding
(NumPy's exp, which the simulator calls, is not the compiled one)."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json, sys
import numpy as np
import numba_flash as nf
from numba import float32, float64
from tests.engine import feature_kernels as kernels
from tests.engine import error_kernels

assert nf.device().name == "sim", nf.device()
rng = np.random.default_rng(0)
report = {}

def compare(name, kernel, grid, block, *args, **options):
    results = []
    for device in ("sim", "cpu"):
        own = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        with nf.ledger() as bill:
            nf.launch(kernel, grid, block, *own, device=device, **options)
        results.append(([a for a in own if isinstance(a, np.ndarray)], bill))
    (sim, sim_bill), (cpu, cpu_bill) = results
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(sim, cpu))
    report[name] = [same, sim_bill.diff(cpu_bill)]

f = lambda *shape: rng.standard_normal(shape).astype(np.float32)
compare("numbering", kernels.numbering, (2, 1, 2), (3, 2, 1), np.zeros((2, 2, 6)))
compare("shared", kernels.make_reverse(8), 2, 8, f(2, 8))
compare("dynamic", kernels.dynamic, 1, 4, f(4), f(4), shared_bytes=32)
compare("local", kernels.make_local(3, float32), 2, 2, f(4, 3), f(4))
compare("device barrier", kernels.make_block_sums(8), 1, 8, f(2, 8), f(2))
compare("closures", kernels.make_closures(2, True, (1, 3), float32), 1, 4, np.arange(4, dtype=np.float32))
compare("atomics", kernels.atomics, 2, 4, np.array([0, 0, 0, 255, 0, 0, 0, 0], np.int32), np.zeros((2, 2), np.float32),
        np.zeros(8, np.int32))
compare("control", kernels.control, 1, 4, np.zeros(4, np.int64), 30)

from numba_flash.stages import PORTABLE
for dtype in (np.float32, np.float64):
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 9, 5), (1, 7, 5), (1, 7, 5)))
    for stage in PORTABLE:
        out = {}
        for device in ("sim", "cpu"):
            with nf.ledger() as bill:
                out[device] = *nf.attention(q, k, v, stage=stage, return_lse=True, device=device), bill
        close = [bool(np.allclose(out["sim"][i], out["cpu"][i], rtol=1e-5)) for i in (0, 1)]
        report[f"{stage} {np.dtype(dtype)}"] = [all(close), out["sim"][2].diff(out["cpu"][2])]
how = {"causal": True, "key_mask": np.array([True, False]), "dropout_p": 0.3, "seed": 7}
q, dout, k, v = (rng.standard_normal((1, n, 4)).astype(np.float32) for n in (5, 5, 2, 2))
for stage in PORTABLE:
    masked = {}
    for device in ("sim", "cpu"):
        run = {"stage": stage, "device": device, **how}
        masked[device] = nf.attention(q, k, v, **run), *nf.attention_backward(q, k, v, dout, **run)
    close = [bool(np.allclose(a, b, rtol=1e-4, atol=1e-6)) for a, b in zip(masked["sim"], masked["cpu"])]
    report[f"{stage} masked"] = [all(close), []]
print(json.dumps(report))
"""


def test_the_simulator_agrees():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": root, "NUMBA_FLASH_DEVICE": ""}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert len(report) >= 12
    assert {name: result for name, result in report.items() if result != [True, []]} == {}
