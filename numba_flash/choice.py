"""Which stage takes a problem, and which of those is the fastest: what `stage="auto"` stands for."""

from typing import NamedTuple

from .blocks import choose_blocks
from .checks import check_deterministic, check_sparse, check_split, dtype_name, integer, probability, truth
from .dtypes import HALVES
from .engine import launch as engine
from .errors import KernelError
from .stages import PORTABLE, STAGES

ON_GPU = "hopper", "tensor_core", "register_tiled", "flash2"  # the fastest first, as measured on an H200
ELSEWHERE = "hopper", "tensor_core", "flash2"  # on the CPU engine register_tiled takes twice as long as flash2


class Choice(NamedTuple):
    """The `name` of a stage, and `why` it was chosen."""

    name: str
    why: str

    def __str__(self):
        return f"{self.name} ({self.why})"


class Needs(NamedTuple):
    """What a call wants of its stage: `direction` "forward" or "backward", the others as arguments of `attention`."""

    dtype: str
    d: int
    direction: str = "forward"
    dropout_p: float = 0.0
    sparse: bool = False
    split_kv: int | None = None
    deterministic: bool = True


def choose_stage(
    *,
    d,
    dtype="float32",
    direction="forward",
    dropout_p=0.0,
    block_mask=False,
    split_kv=None,
    deterministic=True,
    device=None,
):
    """The fastest stage for a problem on a device, and why -> Choice, with `name` and `why`; stage="auto" takes it.

    d, dtype ("float16", "bfloat16", "float32", "float64"), dropout_p, split_kv, deterministic, device: as for
    `attention` and `attention_backward`; block_mask: whether there is one; direction: "forward" or "backward". (Every
    stage takes causal, a key mask and GQA.) Raises the errors of an argument without a meaning, and where no stage
    takes the problem the error of the last that was asked, KernelError where that is for want of a GPU.
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction={direction!r} is unknown: pass 'forward' or 'backward'")
    truth("block_mask", block_mask), truth("deterministic", deterministic)
    needs = Needs(
        dtype_name(dtype), integer("d", d, 1), direction, probability("dropout_p", dropout_p), block_mask, split_kv,
        deterministic,
    )  # fmt: skip
    return fastest(needs, engine.device(device))


def fastest(needs, place):
    """`choose_stage` for Needs on a Device."""
    passed, last = [], None
    for name in ON_GPU if place.name == "gpu" else ELSEWHERE:
        stage = STAGES[name]
        if needs.dtype not in stage.dtypes:
            continue
        try:
            check_takes(stage, needs)
            check_device(stage, place)
            if needs.dtype not in HALVES:
                choose_blocks(name, d=needs.d, dtype=needs.dtype, direction=needs.direction)  # there may be none
        except (ValueError, KernelError) as error:
            passed.append(name)
            last = error
        else:
            others = f", which {' and '.join(passed)} cannot run" if passed else ""
            return Choice(name, f"the fastest on {place} for {needs.dtype}, d = {needs.d}{_features(needs)}{others}")
    raise type(last)(f"stage='auto' finds none: {last}") from last


def _features(needs):
    asked = {
        "dropout": needs.dropout_p,
        "a block mask": needs.sparse,
        "split_kv": needs.split_kv,
        "atomics": not needs.deterministic,
    }
    return "".join(f", {name}" for name, is_asked in asked.items() if is_asked)


def check_takes(stage, needs, shape=None):
    """TypeError or ValueError where a Stage does not take what is needed; `shape`: that of q, where there is one."""
    if needs.sparse:
        check_sparse(stage)
    check_deterministic(stage, needs.deterministic)
    if needs.split_kv is not None:
        check_split(stage, needs.split_kv, needs.sparse or None, needs.dropout_p)
    if needs.dtype not in stage.dtypes:
        takes = " and ".join(stage.dtypes)
        if shape is None:
            raise ValueError(
                f"dtype={needs.dtype!r}: stage {stage.name!r} takes {takes}; pass dtype={stage.dtypes[0]!r}, or "
                "another stage"
            )
        convert = f"q.astype(np.{next(name for name in stage.dtypes if name != 'bfloat16')})"
        other = "auto" if needs.dtype in HALVES else "register_tiled"
        raise TypeError(
            f"q has dtype {needs.dtype}: stage {stage.name!r} takes {takes}; pass stage={other!r}, or convert q, k and "
            f"v, for example {convert}"
        )
    if stage.head_dims and needs.d not in stage.head_dims:
        larger = [d for d in stage.head_dims if d > needs.d]
        fill = f"pad q, k and v with zeros to d = {larger[0]} and pass the scale, or " if larger else ""
        what = f"q has shape {shape}, so d = {needs.d}" if shape else f"d={needs.d}"
        raise ValueError(
            f"{what}: stage {stage.name!r} takes d = {' and '.join(map(str, stage.head_dims))}; {fill}convert them to "
            "float32 and pass stage='register_tiled'"
        )
    if needs.dropout_p and not stage.dropout:
        raise ValueError(
            f"dropout_p={needs.dropout_p!r}: stage {stage.name!r} drops nothing; leave it out, or convert q, k and v "
            "to float32 and pass stage='register_tiled'"
        )
    if needs.direction == "backward" and stage.backward is None:
        raise ValueError(f"stage {stage.name!r} has no backward pass: pass stage='auto', which takes one that has")


def check_device(stage, place):
    """KernelError where a Device does not run a Stage."""
    least = stage.compute_capability
    if least is None:
        return
    capability = engine.compute_capability() if place.name == "gpu" else None
    if capability and (capability == least if stage.architecture_specific else capability >= least):
        return
    which = ".".join(map(str, least)) + ("" if stage.architecture_specific else " or later")
    there = f"this one has {'.'.join(map(str, capability))}" if capability else f"kernels run on {place}"
    ways = [
        f"stage={other.name!r}"
        for other in STAGES.values()
        if capability and other.compute_capability and other is not stage and capability >= other.compute_capability
        and not other.architecture_specific
    ]  # fmt: skip
    way_out = f"pass {ways[0]}, or " if ways else ""
    raise KernelError(
        f"stage {stage.name!r} needs a GPU of compute capability {which}, and {there}; {way_out}convert q, k and v to "
        f"float32 and pass one of {', '.join(map(repr, PORTABLE))}"
    )
