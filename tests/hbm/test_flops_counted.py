"""`flops` equals the operations of the unmodified kernels, run on numbers that count what is done to them.

In Numba's simulator a kernel is plain Python, so `real` may be any class: here one that counts each sum, difference,
product, quotient, exp, log and max.
"""

import json
import os
import subprocess
import sys

SCRIPT = """
import dataclasses, importlib, json, math, threading, types
import numpy as np
from numba.cuda.simulator import kernel as simulator
import numba_flash as nf
from numba_flash import dropout, masks
from tests.stages import modules

class Thread(simulator.BlockThread):  # one thread of a block runs at a time, from barrier to barrier
    def __init__(self, *args):
        super().__init__(*args)
        self.ended, self.parked, self.go = False, threading.Semaphore(0), threading.Semaphore(0)

    def run(self):
        self.go.acquire()
        super().run()
        self.ended = True
        self.parked.release()

    def syncthreads(self):
        self.parked.release()
        self.go.acquire()

def run_block(self, block, *args):
    threads = [Thread(lambda: self._f(*args), self, block, at, False) for at in np.ndindex(*self._block_dim)]
    for thread in threads:
        thread.start()
    while threads:
        for thread in threads:
            thread.go.release()
            thread.parked.acquire()
            if thread.exception:
                raise thread.exception[0]
        threads = [thread for thread in threads if not thread.ended]

simulator.BlockManager.run = run_block
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

class One(Number):  # Z without dropout: a constant factor of 1, which the compiler drops
    def __mul__(self, other):
        return other
    __rmul__ = __mul__

def keep(real, dropped):
    return dropout.make_keep(real, 1) if dropped else lambda *place: One(1)

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

masks.math, masks.make_keep = fake, keep
report = {}
MASKS = (0, 0, 0), (1, 1, 0), (1, 1, 1), (0, 0, 1)
FILLED_UP = 7, 11, 37, (6, 9)
SIZES = (5, 7, 3, (4, 4)), (1, 3, 2, (2, 2)), (3, 0, 2, (2, 2)), (9, 5, 2, (4, 3))
for stage in nf.stages.PORTABLE:
    module = importlib.import_module(f"numba_flash.stages.{stage}")
    for other in modules():
        other.math, other.max = fake, once(max)
        other.SIDE = other.ROWS = other.COLUMNS = 4  # fewer threads, which the simulator starts one by one
        other.numba_type = lambda dtype: Number
        other.empty = lambda shape, dtype, device=None: np.full(shape, Number("nan"), object)
        other.empties = lambda *shapes, dtype, device=None: [other.empty(shape, dtype) for shape in shapes]
        other.launch = lambda kernel, grid, block, *args, device=None: kernel[grid, block](*args)
        other.fitting_blocks = lambda stage, tiles, d, dtype, direction=None: blocks
    sizes = SIZES if stage in ("flash", "flash2") else SIZES[:3]  # the others have many threads
    for N, N_k, d, blocks in (*sizes, FILLED_UP) if stage == "register_tiled" else sizes:
        if stage in ("tiled", "online_softmax"):
            blocks = blocks[:1] * 2
        rng = np.random.default_rng(0)
        numbers = np.vectorize(Number, otypes=[object])
        Q = numbers(rng.standard_normal((2, N, d)))
        K, V = (numbers(x) if N_k else x.astype(object) for x in rng.standard_normal((2, 1, N_k, d)))
        for causal, dropped, sparse in {5: MASKS, 7: MASKS[1:2], 9: MASKS[:2]}.get(N, MASKS[::2]):
            if sparse and (stage != "flash2" or not N_k):
                continue
            mask = dataclasses.replace(masks.no_mask(), causal=bool(causal), p_drop=np.float64(dropped / 4))
            asked = {"causal": bool(causal), "dropout_p": dropped / 4, "blocks": None if stage == "naive" else blocks}
            if sparse:
                tiles = rng.random((-(-N // blocks[0]), -(-N_k // blocks[1]))) < 0.6
                mask = dataclasses.replace(mask, blocks=tiles.astype(np.uint8), sides=blocks)
                asked["block_mask"] = tiles
            how = {"mask": mask, "blocks": blocks}
            name = f"{stage} N={N} N_k={N_k} d={d} causal={causal} dropped={dropped} sparse={sparse}"
            for lse in (False, True) if not (causal or sparse) else (True,):
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
                    if direction == "both" and nf.STAGES[stage].fused and not sparse:  # ran forward in these tiles
                        want += flops(stage, N, N_k, d, **asked) - flops(stage, N, N_k, d, **asked | {"blocks": None})
                    report[f"{name} {direction} {atomic}"] = [count, want]
        for causal in (False, True) if stage == "flash2" else ():
            mask = dataclasses.replace(masks.no_mask(), causal=causal)
            for splits in (1, 3):
                count = 0
                blocks = 1, blocks[1]
                nf.STAGES[stage].forward_split(Q, K, V, Number(0.5), splits, mask=mask, blocks=blocks)
                asked = {"causal": causal, "blocks": blocks, "split_kv": splits}
                report[f"split {N} {N_k} {causal} {splits}"] = [count, flops(stage, N, N_k, d, **asked)]
print(json.dumps(report))
"""


def test_flops_are_what_the_kernels_do():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": root, "NUMBA_FLASH_DEVICE": ""}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert len(report) >= 100
    assert {name: pair for name, pair in report.items() if pair[0] != pair[1]} == {}
