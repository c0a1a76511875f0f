"""The ladder on a GPU, timed beside torch: forward, backward, decoding, the cost of counting, the cost of a launch."""

import bisect
import contextlib
import itertools
import math
import platform
import sys
from importlib import metadata

import numpy as np
from numba import cuda

from .. import reference, timing
from ..attention import attention, attention_backward
from ..blocks import tiles
from ..engine.launch import empty, free_bytes, to_device, to_host
from ..engine.model import GRID_YZ
from ..errors import KernelError, OutOfMemory
from ..figures.memory import elements, stored
from ..hbm.ledger import ledger
from ..hbm.predict import predict
from ..report import in_bytes, progress
from ..stages import PORTABLE, STAGES
from ..testing import inputs
from . import peers
from .gpu_page import page
from .peers import PEERS

__all__ = ["PASSES", "SIZES", "page", "parts", "run"]

PASSES = ("forward", "backward", "decode")
SIZES = {"n": 4096, "d": 64, "batch": 4, "heads": 16}
TENSORS = {"forward": (4, 4.5), "backward": (8, 8), "decode": (2, 3)}  # N × d a head: moved; held, with float16's
MOST = 1  # second: what has run for so long in all is not run again
COPIES = 256  # of the inputs, at most
CHECKED = 64  # rows of each result that are compared with float64
LIMITS = {"float32": 1e-4, "float16": 2e-2}  # of their errors, where the largest element is 1
SIDE = 8192  # of the matrices whose product is timed
COPIED = 2**29  # bytes
LAUNCHED = {"n": 256, "d": 64, "stages": ("flash2", "register_tiled"), "repeats": 100}


def run(*, n, d, batch, heads, causal=False, stages=PORTABLE, passes=PASSES, repeats=5):
    """Measure -> figures, in seconds, bytes and floating-point operations. All inputs are float32.

    "right": whether every result was that of float64 up to rounding and every bill the predicted one. What cannot run
    is in "left_out" with the reason, {name: sentence}. Raises ValueError for more heads than a grid holds, OutOfMemory
    where the inputs of the only pass do not fit.
    """
    if batch * heads > GRID_YZ:
        raise ValueError(f"--batch {batch} × --heads {heads} is more than the {GRID_YZ:,} heads of a CUDA grid")
    torch, missing = peers.load()
    machine = hardware()
    sizes = {"n": n, "d": d, "batch": batch, "heads": heads}
    figures = {
        "device": "gpu",
        "gpu": machine,
        **sizes,
        "causal": causal,
        "dtype": "float32",
        "repeats": repeats,
        "versions": versions() | {"torch": torch and torch.version},
        "no_torch": missing,
        "rates": rates(torch, repeats),
        "passes": {},
        "left_out": {},
    }
    for direction in passes:
        timing.idle()
        if torch:
            torch.give_back()
        try:
            bench = Bench(direction, sizes, causal and direction != "decode", stages, torch, machine, repeats)
        except OutOfMemory as error:
            if len(passes) == 1:
                raise
            figures["left_out"][direction] = str(error)
            continue
        figures["passes"][direction] = bench.timed(figures["rates"])
        if direction == "forward":
            figures["counting"] = bench.counted()
        del bench  # its arrays, before those of the next
    if "forward" in passes:
        figures["launch"] = launch_cost(torch)
    return figures | {"right": all(not part["wrong"] for part in parts(figures))}


def parts(figures):
    """Those parts of the figures that have "left_out" and "wrong"."""
    return [*figures["passes"].values(), *([figures["counting"]] if "counting" in figures else [])]


def versions():
    found = {"python": platform.python_version(), "numba-cuda": None}
    for name in ("numba", "numba-cuda", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def hardware():
    """What the times depend on."""
    from ..engine.gpu import limits

    gpu = cuda.get_current_device()
    return {
        "name": limits().name,
        "compute_capability": list(limits().compute_capability),
        "multiprocessors": gpu.MULTIPROCESSOR_COUNT,
        "l2_bytes": gpu.L2_CACHE_SIZE,
        "free_bytes": free_bytes(),
    }


def rates(torch, repeats):
    """What this machine reaches: FLOP/s of a large matmul by torch, and bytes/s, read and written, of a large copy."""
    free = free_bytes()
    size, side = min(COPIED, free // 8), min(SIDE, 2 ** (math.isqrt(free // 100).bit_length() - 1))
    A, B = (empty(size // 4, np.float32) for _ in range(2))
    works = (torch.matmuls(side) if torch else {}) | {"copy": lambda: copy(A, B)}
    times = timing.interleaved(works, repeats)
    amounts = dict.fromkeys(works, 2 * side**3) | {"copy": 2 * size}
    found = {name: timing.spread([amounts[name] / one for one in seconds]) for name, seconds in times.items()}
    return {"side": side, "copied_bytes": size, **found}


def copy(A, B):
    B.copy_to_device(A)


# --- a pass -----------------------------------------------------------------------------------------------------------


class Bench:
    """One pass: its inputs in several copies, what runs on them, and what comes out.

    The copies are used in turn, so that no run finds its inputs in L2: together they are larger than it is.
    """

    def __init__(self, direction, sizes, causal, stages, torch, machine, repeats):
        self.direction, self.sizes, self.causal, self.stages = direction, sizes, causal, stages
        self.torch, self.machine, self.repeats = torch, machine, repeats
        n, d, heads = sizes["n"], sizes["d"], sizes["batch"] * sizes["heads"]
        shape = sizes["batch"], sizes["heads"], n, d
        self.q_shape = (*shape[:2], 1, d) if direction == "decode" else shape
        moved, held = TENSORS[direction]
        self.bytes = 4 * heads * d * (moved * n + (2 if direction == "decode" else 0))  # each tensor once
        self.flop = 4 * heads * self.q_shape[2] * n * d * (2.5 if direction == "backward" else 1) / (1 + causal)
        self.copies = min(1 + tiles(machine["l2_bytes"], max(self.bytes // 2, 1)), COPIES)  # half: as float16
        refuse_if_too_large(lambda n: int(4 * heads * d * n * (self.copies * held + 3)), n, "the input")
        host = inputs(self.q_shape, shape)
        dout = np.random.default_rng(1).standard_normal(self.q_shape, np.float32)
        self.sets = [self.one_set(*host, dout) for _ in range(self.copies)]
        self.expected = self.reference(*host, dout)
        self.tensors = {}
        self.turn = itertools.cycle(range(self.copies))

    def one_set(self, *host):
        if self.direction != "backward":
            return [to_device(x) for x in host[:3]]
        q, k, v, dout = (to_device(x) for x in host)
        return [q, k, v, dout, *attention(q, k, v, return_lse=True, causal=self.causal)]

    def reference(self, q, k, v, dout):
        """Of the last rows of the first head, in float64: [O], or for "backward" [dQ, dK, dV]."""
        q, k, v, dout = (x[0, 0] for x in (q, k, v, dout))
        last = q[-CHECKED:], k, v
        if self.direction != "backward":
            return [reference.attention(*last, causal=self.causal)[0]]
        out, lse = (np.asarray(to_host(x)[0, 0], np.float64) for x in self.sets[0][4:])
        dQ, _, _ = reference.attention_backward(*last, dout[-CHECKED:], causal=self.causal)
        return [dQ, *of_last_keys(q, k, v, dout, out, lse, self.causal)]

    # what runs

    def stage(self, stage, **how):
        """A function that runs the stage on the next inputs and returns (O,), or dQ, dK and dV."""
        how |= {"stage": stage, "causal": self.causal}
        self.refuse_scores(stage)
        if self.direction != "backward":
            return lambda: (attention(*self.sets[next(self.turn)], **how),)

        def work():
            q, k, v, dout, out, lse = self.sets[next(self.turn)]
            return attention_backward(q, k, v, dout, out=out, lse=lse, **how)

        return work

    def refuse_scores(self, stage):
        """OutOfMemory where the matrices of a stage that stores them do not fit."""
        if STAGES[stage].fused or self.direction == "decode":
            return
        tensors = stored(predict(stage, n=1, d=1, direction=self.direction).kernels.values())
        heads, d = self.sizes["heads"] * self.sizes["batch"], self.sizes["d"]
        names = [tensor for tensor in tensors if elements(tensor, 2, 1) == 4]

        def needed(n):
            return 4 * heads * sum(elements(tensor, n, d) for tensor in tensors)

        refuse_if_too_large(needed, self.sizes["n"], " and ".join(names))

    def peer(self, name):
        """The same of a peer, on tensors that share the memory of the inputs or, as float16, are a copy of them."""
        dtype = PEERS[name].dtype
        if dtype not in self.tensors:
            self.tensors[dtype] = [[self.torch.share(x, dtype) for x in one[:4]] for one in self.sets]
        tensors = self.tensors[dtype]
        if self.direction != "backward":
            return lambda: (self.torch.attention(name, *tensors[next(self.turn)], self.causal),)
        backward = [self.torch.gradients(name, *one, self.causal) for one in tensors]
        return lambda: backward[next(self.turn)]()

    def works(self):
        """{name: function that makes what runs}: the stages, for decoding with several splits too, and the peers."""
        made = {stage: lambda stage=stage: self.stage(stage) for stage in self.stages}
        if self.direction == "decode" and "flash2" in self.stages:
            heads = self.sizes["batch"] * self.sizes["heads"]
            once = tiles(self.machine["multiprocessors"], heads)  # a block for each multiprocessor
            for splits in (once, 4 * once, 16 * once):
                made[f"flash2 split_kv={splits}"] = lambda splits=splits: self.stage("flash2", split_kv=splits)
        if self.torch:
            made |= {name: lambda name=name: self.peer(name) for name in PEERS}
        return made

    # what comes out

    def timed(self, rates):
        """Every work in turn -> rows {name: times, rates, speed beside each peer}, and what is left out or wrong."""
        made, errors, left_out = self.works(), {}, {}
        with progress(self.direction, len(made) * (self.repeats + 1)) as advance:
            works = {name: self.guarded(name, make, errors, left_out, advance) for name, make in made.items()}
            times = timing.interleaved(works, self.repeats, most=MOST)
        times = {name: seconds for name, seconds in times.items() if name not in left_out}
        rows = {name: self.row(name, seconds, errors[name], rates) for name, seconds in times.items()}
        for row in rows.values():
            row["speed"] = {
                peer: rows[peer]["seconds"]["median"] / row["seconds"]["median"] for peer in PEERS if peer in rows
            }
        wrong = [name for name, row in rows.items() if self.is_wrong(row["error"], row["dtype"])]
        amounts = {"flop": self.flop, "bytes": self.bytes, "copies": self.copies, "copied_bytes": self.input_bytes()}
        return amounts | {"rows": rows, "left_out": left_out, "wrong": wrong}

    def input_bytes(self):
        return self.copies * sum(x.nbytes for x in self.sets[0])

    def row(self, name, seconds, error, rates):
        dtype, bound = (PEERS[name].dtype, PEERS[name].matmul) if name in PEERS else ("float32", "float32")
        spread = timing.spread(seconds)
        flop, moved = self.flop / spread["median"], self.bytes * np.dtype(dtype).itemsize // 4 / spread["median"]
        return {
            "dtype": dtype,
            "seconds": spread,
            "runs": len(seconds),
            "flop_per_second": flop,
            "bytes_per_second": moved,
            "of_matmul": flop / rates[bound]["median"] if bound in rates else None,
            "of_copy": moved / rates["copy"]["median"],
            "error": error,
        }

    def guarded(self, name, make, errors, left_out, advance):
        """A work whose first run is compared with float64. One that fails is left out, and does nothing after that."""
        work = None

        def run():
            nonlocal work
            advance()
            if name in left_out:
                return
            with peers.caught() if work is None else contextlib.nullcontext([]) as warned:
                try:
                    if work is None:
                        work = make()
                        errors[name] = self.error(name, work())
                    else:
                        work()
                except (KernelError, ValueError) as error:
                    left_out[name] = str(error)
                except RuntimeError as error:  # torch's
                    left_out[name] = peers.why_not(error, warned, self.sizes["n"])

        return run

    def error(self, name, results):
        """The largest difference from float64 over the largest element, of all results; None where one is NaN."""
        to_numpy = self.torch.to_host if name in PEERS else to_host
        errors = [
            float(np.abs(to_numpy(result[0, 0, -len(true) :]) - true).max() / np.abs(true).max())
            for result, true in zip(results, self.expected, strict=True)
        ]
        return max(errors) if all(map(math.isfinite, errors)) else None

    def is_wrong(self, error, dtype="float32"):
        return error is None or error > LIMITS[dtype]

    def counted(self):
        """What counting costs: each stage plain and inside `ledger` -> times, their quotient, whether bills agree."""
        bills, left_out, errors = {}, {}, {}
        problem = {name: self.sizes[name] for name in ("n", "d", "heads", "batch")} | {"causal": self.causal}

        def counting(stage):
            plain = self.stage(stage)

            def work():
                with ledger() as bill:
                    result = plain()
                bills.setdefault(stage, []).append(bill)
                return result

            return work

        made = {}
        for stage in self.stages:
            made[stage, "plain"] = lambda stage=stage: self.stage(stage)
            made[stage, "counted"] = lambda stage=stage: counting(stage)
        with progress("counting", len(made) * (self.repeats + 1)) as advance:
            works = {name: self.guarded(name, make, errors, left_out, advance) for name, make in made.items()}
            times = timing.interleaved(works, self.repeats, most=MOST)
        rows = {}
        left_out = {stage: why for (stage, _), why in left_out.items()}
        for stage in self.stages:
            if stage not in left_out:
                plain, inside = (timing.spread(times[stage, how]) for how in ("plain", "counted"))
                equal = all(bill == predict(stage, **problem) for bill in bills[stage])
                blocks = max(math.prod(launch.grid) for launch in bills[stage][0].launches)
                rows[stage] = {
                    "blocks": blocks,
                    "plain": plain,
                    "counted": inside,
                    "overhead": inside["median"] / plain["median"],
                }
                rows[stage] |= {"equal": equal, "error": errors[stage, "counted"]}
        wrong = [name for name, row in rows.items() if not row["equal"] or self.is_wrong(row["error"])]
        return {"rows": rows, "left_out": left_out, "wrong": wrong}


def of_last_keys(q, k, v, dout, out, lse, causal):
    """dK and dV of the last keys of one head, in float64 but for O and L, which a forward pass in float32 gave."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k[-CHECKED:], v[-CHECKED:], dout))
    scale, N = 1 / math.sqrt(q.shape[1]), len(q)
    P = np.exp(q @ k.T * scale - lse[:, None])
    if causal:
        P *= np.arange(N)[:, None] >= N - len(k) + np.arange(len(k))
    dS = P * (dout @ v.T - (dout * out).sum(axis=1, keepdims=True))
    return [scale * dS.T @ q, P.T @ dout]


def refuse_if_too_large(needed, n, what):
    """OutOfMemory where `needed(n)` bytes are more than are free: what is asked, what is free, and an n that fits."""
    free = free_bytes()
    if free is not None and needed(n) > free:
        fits = bisect.bisect_right(range(n), free, key=needed) - 1
        fits = fits // 64 * 64 or fits
        way_out = f"--n {fits} fits" if fits > 0 else "use fewer heads"
        raise OutOfMemory(f"{what}: {in_bytes(needed(n))} are needed, and {in_bytes(free)} are free; {way_out}")


# --- a launch ---------------------------------------------------------------------------------------------------------


def launch_cost(torch):
    """What `attention` takes for one small head from call to result, beside its kernel on the GPU -> rows, seconds.

    "call": from the call to the end of the kernel, on the CPU's clock; "bare": the same of the one kernel that it
    launches, launched by Numba alone; "kernel": that kernel, by events. "added" is call − kernel.
    """
    n, d, stages, repeats = LAUNCHED.values()
    q, k, v = (to_device(x) for x in inputs((n, d), (n, d)))
    rows, left_out = {}, {}
    for stage in stages:
        bare = bare_launch(stage, q, k, v)
        calls = {"call": lambda stage=stage: attention(q, k, v, stage=stage), "bare": bare}
        rows[stage] = against_events(calls, bare, repeats)
    if torch:
        tensors = [torch.share(x, "float32")[None, None] for x in (q, k, v)]

        def call():
            return torch.attention("torch efficient", *tensors, False)

        try:
            rows["torch efficient"] = against_events({"call": call}, call, repeats)
        except RuntimeError as error:
            left_out["torch efficient"] = peers.why_not(error, [], n)
    return {"n": n, "d": d, "repeats": repeats, "rows": rows, "left_out": left_out}


def against_events(calls, kernel, repeats):
    waited = {name: lambda call=call: (call(), synchronize()) for name, call in calls.items()}
    times = timing.interleaved(waited, repeats, timing.wall_seconds)
    on_gpu = timing.spread(timing.interleaved({"": kernel}, repeats)[""])
    row = {name: timing.spread(seconds) for name, seconds in times.items()} | {"kernel": on_gpu}
    return row | {"added": row["call"]["median"] - on_gpu["median"]}


def synchronize():
    cuda.synchronize()


def bare_launch(stage, q, k, v):
    """The launch that `attention` makes, as Numba makes it, without anything of ours."""
    module = sys.modules[STAGES[stage].forward.__module__]
    ours, launches = module.launch, []
    module.launch = lambda kernel, grid, block, *args, device=None: launches.append((kernel, grid, block, args))
    try:
        attention(q, k, v, stage=stage)
    finally:
        module.launch = ours
    ((kernel, grid, block, args),) = launches
    configured = timing.configured(kernel, grid, block)
    return lambda: configured(*args)
