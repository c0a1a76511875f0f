"""What figures run: counts of one head; on a GPU, times and the bytes that DRAM moves, or why there are none.

What cannot be run is left out, and a sentence says why, so that the rest is still shown.
"""

from argparse import Namespace
from functools import cache, partial

import numpy as np

from .. import timing
from ..attention import attention, attention_backward
from ..blocks import fitting_blocks
from ..engine.launch import backend, free_bytes, to_device
from ..engine.model import GRID_YZ
from ..errors import KernelError
from ..hbm import profiler
from ..hbm.ledger import ledger
from ..hbm.predict import flops, predict
from ..testing import inputs
from .common import place
from .memory import GIVEN, elements, stored

FLOAT32 = 4  # bytes
REPEATS = 5
MOST = 1e13  # floating-point operations of a pass on a GPU: naive takes some ten seconds
PLACES = {"gpu": "the GPU", "cpu": "the CPU engine"}
PASSES = {"forward": "forward", "both": "forward and backward"}


# --- counted ----------------------------------------------------------------------------------------------------------


@cache
def count(stage, *, n, d, direction="forward", blocks=None, deterministic=True):
    """Run a pass of one head in float32 on the device that is there, or else on the CPU engine, and count its bill.

    direction: "forward" or "both". The figures are elements; "diff" says where they differ.
    """
    how = {"direction": direction, "blocks": blocks}
    predicted = predict(stage, n=n, d=d, deterministic=deterministic, **how)
    with ledger() as counted:
        work(stage, inputs((n, d), (n, d)), place(), deterministic=deterministic, **how)()
    sums = {"predicted": predicted.elements, "counted": counted.elements}
    return {"n": n, "d": d, **sums, "diff": counted.diff(predicted), "equal": counted == predicted}


def verdict(counted):
    """Whether what was counted is what was predicted, in a sentence."""
    wrong = {name: row["diff"] for name, row in counted.items() if not row["equal"]}
    if not wrong:
        return "Predicted and counted are equal, tensor by tensor."
    lines = [f"    {name}: {line}" for name, diff in wrong.items() for line in diff]
    return "\n".join(["PREDICTED AND COUNTED DIFFER:", *lines])


def work(stage, given, device, *, direction, blocks=None, block_mask=None, deterministic=True):
    """A function that runs a pass on q, k, v and, in a training step, dout."""
    mask = None if block_mask is None else to_device(block_mask, device)
    how = {"stage": stage, "blocks": blocks, "block_mask": mask, "device": device}
    if direction == "forward":
        return partial(attention, *given[:3], **how)
    q, k, v, *dout = given
    dout = dout or [np.random.default_rng(1).standard_normal(q.shape, q.dtype)]
    return partial(attention_backward, q, k, v, *dout, deterministic=deterministic, **how)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def times(sizes, passes):
    """Time `passes`, name -> the keywords of `work`, in float32 on inputs in GPU memory -> figures; None without a GPU.

    "seconds": name -> median, min and max of REPEATS runs, taken in turn; "why": what is not there, in a sentence.
    """
    if place() != "gpu":
        return None
    why = {name: refusal(sizes, **how) for name, how in passes.items()}
    works, seconds = {}, {}
    shape = tuple(sizes[name] for name in ("batch", "heads", "n", "d"))
    try:
        if not all(why.values()):
            q, k, v = inputs(shape, shape)
            given = [to_device(x, "gpu") for x in (q, k, v, np.random.default_rng(1).standard_normal(shape, q.dtype))]
        for name in [name for name in passes if not why[name]]:
            one = work(given=given, device="gpu", **passes[name])
            try:
                one()  # compiles
                timing.idle()
            except (ValueError, KernelError, MemoryError) as error:
                why[name] = str(error)
            else:
                works[name] = one
        if works:
            seconds = {name: timing.spread(taken) for name, taken in timing.interleaved(works, REPEATS).items()}
    except (KernelError, MemoryError) as error:  # another program takes the memory
        why |= {name: str(error) for name in passes if not why[name]}
    return {"gpu": gpu_name(), "repeats": REPEATS, "seconds": seconds, "why": {k: v for k, v in why.items() if v}}


def dram(sizes, stages):
    """Bytes that DRAM reads and writes in the forward pass of stages, in float32, as ncu measures them -> figures.

    "bytes": stage -> "read", "written" and "kernels", which has both for each kernel. "why": what is not there, in a
    sentence. What has failed twice in a row for the same reason is not tried again.
    """
    moved, why = {}, {}
    for stage in stages:
        last = list(why.values())[-2:]
        if len(last) == 2 and len(set(last)) == 1 and last[0].startswith("nothing was measured"):
            why[stage] = last[0]
        elif refused := refusal(sizes, stage, "forward"):
            why[stage] = refused
        else:
            try:
                kernels = profiler.measure(bill_flags(stage, sizes), predict(stage, **sizes).kernels)
            except KernelError as error:
                why[stage] = str(error)
                continue
            each = {name: {"read": one["dram_read"], "written": one["dram_written"]} for name, one in kernels.items()}
            moved[stage] = {kind: sum(one[kind] for one in each.values()) for kind in ("read", "written")}
            moved[stage]["kernels"] = each
    return {"bytes": moved, "why": why}


def bill_flags(stage, sizes):
    """The flags of `bill` for the forward pass of a stage, which the profiler runs."""
    unset = dict.fromkeys(("n_k", "kv_heads", "blocks", "split_kv"))
    more = {"seed": 0, "dtype": "float32", "direction": "forward", "return_lse": False, "causal": False}
    return Namespace(stage=stage, **sizes, **unset, **more, dropout=0.0, atomics=False)


def gpu_name():
    return backend("gpu").limits().name


def refusal(sizes, stage, direction, blocks=None, block_mask=None, deterministic=True):
    """Why a pass cannot run on the GPU at these sizes, in a sentence with sizes that can; None where it can.

    With a block mask it is asked as if all tiles were computed.
    """
    try:
        part = "forward" if direction == "forward" else "backward" if deterministic else "atomic"
        fitting_blocks(stage, blocks, d=sizes["d"], dtype="float32", direction=part)
    except ValueError as error:
        return str(error)
    how = {"direction": direction, "blocks": blocks, "deterministic": deterministic}
    tensors = {*GIVEN, *stored(predict(stage, n=1, d=1, **how).kernels.values())}
    free, what = free_bytes("gpu"), f"{stage}, {PASSES[direction]},"

    def heads(s):
        return s["heads"] * s["batch"]

    def needed(s):
        return FLOAT32 * heads(s) * sum(elements(tensor, s["n"], s["d"]) for tensor in tensors)

    def operations(s):
        return flops(stage, **s, **how)

    def fits(s):
        return heads(s) <= GRID_YZ and needed(s) <= free and operations(s) <= MOST

    if fits(sizes):
        return None
    other = f": {found} fits" if (found := fitting(sizes, fits)) else ""
    if heads(sizes) > GRID_YZ:
        return f"{heads(sizes):,} heads over the batch: a CUDA grid holds {GRID_YZ:,}{other}"
    if needed(sizes) > free:
        return f"{what} needs {needed(sizes):,} B of GPU memory; {free:,} B are free{other}"
    return f"{what} takes {operations(sizes):.1e} operations, which would run for minutes{other}"


def fitting(sizes, fits):
    """The flags of smaller sizes that fit: a smaller batch, then fewer heads, then a smaller N; None for none."""
    smaller = dict(sizes)
    for name in ("batch", "heads", "n"):
        while not fits(smaller) and smaller[name] > 1:
            smaller[name] //= 2
    if not fits(smaller):
        return None
    return " ".join(f"--{name} {smaller[name]}" for name in ("batch", "heads", "n") if smaller[name] < sizes[name])
