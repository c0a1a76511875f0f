"""`attention` and `attention_backward`: check the arguments, pick the stage, launch, hand the result back."""

import math
import reprlib
import warnings
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from .blocks import boolean_tiles, fitting_blocks, fitting_sides, kernel_tiles, mask_blocks
from .checks import check_sparse, check_split, check_stage, probability, seed_of_64_bits, truth
from .choice import Needs, check_device, check_takes, fastest
from .dtypes import BFLOAT16, DTYPES, lse_dtype, name_of
from .engine import launch as engine
from .engine import model
from .masks import no_mask, rows_with_keys
from .stages import STAGES
from .stages.naive import SIDE

MAX_D = 256  # features a head


def attention(
    q,
    k,
    v,
    *,
    stage="flash2",
    scale=None,
    causal=False,
    key_mask=None,
    dropout_p=0.0,
    seed=0,
    block_mask=None,
    split_kv=None,
    blocks=None,
    return_lse=False,
    device=None,
):
    """Exact attention, O = softmax(scale · Q Kᵀ) V, computed by one stage of the ladder.

    q: (N, d), (H, N, d) or (B, H, N, d), float32 or float64, d from 1 to 256; for the stages tensor_core and hopper
    float16 or bfloat16 (ml_dtypes' or torch's; of NumPy's dtypes, V2), d = 64 or 128. k and v: one shape, with the
    rank, batch, d and dtype of q, their own length N_k, and as many heads as q or a divisor of that (GQA: head h of q
    uses head h // (H / H_kv) of k and v). N = 0 gives an empty result; N_k = 0 gives out = 0 and lse = −∞.

    stage: a name in `STAGES`, or "auto": what `choose_stage` says. scale: a finite number, by default 1/√d, rounded to
    the dtype of q, for halves to float32. blocks: the sides of the tiles, as the stage explains them; tensor_core and
    hopper have their own. device: "cpu", "gpu" or "sim", by default what `numba_flash.device()` says; tensor_core and
    hopper need a GPU.

    causal: query i sees key j where j ≤ i + N_k − N, aligned at the bottom right as in the flash-attn package
    (PyTorch's is_causal is aligned at the top left). key_mask: booleans (N_k,), or (B, N_k) where q has four axes; a
    key with False is seen by no query (in torch's key_padding_mask, True is). It must be finite all the same: 0 · NaN
    is NaN. block_mask (flash2 alone): booleans (⌈N/Br⌉, ⌈N_k/Bc⌉), the same for all heads; a tile with False is not
    computed. Its tiles are `blocks`, by default choose_blocks("flash2", d=d, dtype=dtype, direction="both"); `patterns`
    has some ready-made. A row that sees no key has out = 0 and lse = −∞.

    dropout_p: the probability, 0 or more and below 1, that a weight is dropped; the others are multiplied by 1 / (1 −
    dropout_p), and lse stays what it is without. Which ones depends on seed (below 2⁶⁴), head, query and key alone, not
    on stage, blocks or device. A call always draws the same for a seed, from head 0 on: give each step, each layer and
    each part of a batch another seed.

    split_kv (flash2 alone): for decoding, where queries are few and keys many: how many blocks share the keys of each
    query (Flash-Decoding). blocks is (1, Bc) then.

    Returns out, shaped like q and in its dtype, or (out, lse) with return_lse: lse is shaped like q without its last
    axis and holds L_i = log Σ_j exp(S_ij), natural logarithm, in float32 where q is float16 or bfloat16. The result is
    always new memory. NumPy arrays give NumPy arrays. Arrays in GPU memory (`__cuda_array_interface__`: torch, cupy,
    numba) stay there: the result is a numba device array, and nothing is copied. Input of any strides is right; what is
    not contiguous is copied once. A subclass of NumPy's array counts as the plain array, a masked array is refused. The
    stages flash, flash2 and register_tiled hold l·O while they sum, so that values of V beyond the largest number over
    N_k overflow in them.

    Raises TypeError for an argument of the wrong kind (a list, another or a mixed dtype, host and GPU memory mixed),
    ValueError for a wrong value (shapes that do not fit, no heads, d out of range, scale NaN or infinite, an unknown
    stage, more than 65,535 heads over the batch, sizes beyond 64 bits, blocks that do not fit, what the stage does not
    take), OutOfMemory when a copy does not fit, KernelError for a device that is not there or cannot run the stage.
    Source: Dao et al. 2022, arXiv:2205.14135, Algorithm 0; each stage names its own.
    """
    known = None
    if key_mask is None and block_mask is None:
        known = _known((q, k, v), (stage, scale, causal, dropout_p, seed, split_kv, blocks, return_lse), device)
        if settled := _settled.get(known):
            run, numbers, *shapes = settled
            O, L = run(*map(engine.reshaped, (q, k, v), shapes), *numbers)
            out = engine.reshaped(O, q.shape)
            return (out, engine.reshaped(L, q.shape[:-1])) if return_lse else out
    check_stage(stage, (*STAGES, AUTO))
    if block_mask is not None and stage != AUTO:
        check_sparse(STAGES[stage])
    operands = _operands({"q": q, "k": k, "v": v})
    dtype = operands[0].dtype
    H, N, N_k, d = _sizes(*operands)
    _check_64_bit(H, N, N_k, d, dtype)
    scale = _scale(scale, d, dtype)
    p_drop = probability("dropout_p", dropout_p)
    needs = Needs(name_of(dtype), d, "forward", p_drop, block_mask is not None, split_kv)
    stage = _stage(stage, needs, blocks, operands[0], device)
    splits = split_kv if split_kv is None else check_split(STAGES[stage], split_kv, block_mask, dropout_p)
    if block_mask is not None:
        blocks = mask_blocks(blocks, d=d, dtype=dtype)
    blocks = fitting_blocks(stage, blocks, d=d, dtype=dtype, direction="split" if splits else "forward")
    _check_grid(stage, blocks, {"q": N})
    truth("return_lse", return_lse)
    where = engine.device(device)
    check_device(STAGES[stage], where)
    place = where.name
    operands = _at(place, operands)
    mask = _mask(causal, key_mask, operands[0], N_k, place)
    mask = _sparse(_dropping(mask, dropout_p, seed), block_mask, blocks, N, N_k, place)

    if N == 0:  # nothing to launch
        O, L = engine.empty((H, 0, d), dtype, place), engine.empty((H, 0), lse_dtype(dtype), place)
    else:
        Q, K, V = (_as_heads(operand, place) for operand in operands)
        how = {"mask": mask, "blocks": blocks, "device": place}
        if splits:
            run, numbers = partial(STAGES[stage].forward_split, **how), (scale, splits)
        else:
            run, numbers = partial(STAGES[stage].forward, return_lse=bool(return_lse), **how), (scale,)
        O, L = run(Q, K, V, *numbers)
        if known:
            if len(_settled) == SETTLED:
                _settled.clear()
            _settled[known] = run, numbers, Q.shape, K.shape, V.shape
    q = operands[0]
    out = _result(O, q.shape, q)
    return (out, _result(L, q.shape[:-1], q)) if return_lse else out


def attention_backward(
    q,
    k,
    v,
    dout,
    *,
    out=None,
    lse=None,
    stage="flash2",
    scale=None,
    causal=False,
    key_mask=None,
    dropout_p=0.0,
    seed=0,
    block_mask=None,
    blocks=None,
    deterministic=True,
    device=None,
):
    """Gradients of Σ(out ∘ dout) with respect to q, k and v, by the backward pass of one stage -> (dq, dk, dv).

    q, k, v, scale, causal, key_mask, dropout_p, seed, block_mask and device: as for `attention` (but register_tiled in
    float64 reaches d = 224). dout: the gradient of out, shaped like q and in its dtype. out and lse: what
    `attention(..., return_lse=True)` gave for the same arguments; the stages without S and P in HBM compute from them,
    the others form S and P again. Without out and lse the stage's forward pass runs first, and keeps what its backward
    pass wants: the bill shows its kernels on lines of their own. blocks: the tile sizes of the backward pass, as its
    stage explains them; with a block_mask, of both passes, by default those of `attention`.
    deterministic=False: blocks add to dq by atomics, in the order in
    which they happen to run (flash2 alone); otherwise every run gives the same bits.

    P = exp(S − lse), and lse is rounded: from lse (flash2 always), the gradients have a relative error of about
    |lse| · eps, a percent at 10⁵ in float32. That out and lse belong to these arguments is not checked.

    Returns dq, dk and dv, shaped like q, k and v and in their dtype; new memory, NumPy arrays or device arrays as the
    input is. Where several heads of q share one of k and v, dk and dv are sums over them. With no queries dk and dv are
    0, with no keys dq is 0.

    Raises what `attention` raises, and TypeError or ValueError for dout, out or lse of the wrong kind, shape or dtype,
    for one of out and lse without the other, and for an lse that is not finite. Source: Dao et al. 2022,
    arXiv:2205.14135, Algorithms 3 and 4; Dao 2023, arXiv:2307.08691, Algorithm 2; each stage names its own.
    """
    check_stage(stage, (*STAGES, AUTO))
    if block_mask is not None and stage != AUTO:
        check_sparse(STAGES[stage])
    given = {"q": q, "k": k, "v": v, "dout": dout}
    if (out is None) != (lse is None):
        there, missing = ("out", "lse") if lse is None else ("lse", "out")
        raise ValueError(f"{there} is given without {missing}: pass both, or none to run the forward pass first")
    operands = _operands(given if out is None else {**given, "out": out, "lse": lse})
    dtype = operands[0].dtype
    H, N, N_k, d = _sizes(*operands[:3])
    _check_64_bit(H, N, N_k, d, dtype)
    _check_results(operands[0], operands[3:])
    scale = _scale(scale, d, dtype)
    truth("deterministic", deterministic)
    p_drop = probability("dropout_p", dropout_p)
    needs = Needs(name_of(dtype), d, "backward", p_drop, block_mask is not None, None, deterministic)
    stage = _stage(stage, needs, blocks, operands[0], device)
    sides = None
    if block_mask is not None:
        sides = fitting_sides(blocks, d=d, dtype=dtype, deterministic=deterministic)
        blocks = kernel_tiles(sides, deterministic)
    blocks = fitting_blocks(stage, blocks, d=d, dtype=dtype, direction="backward" if deterministic else "atomic")
    _check_grid(stage, blocks, {"q": N, "k": N_k})
    where = engine.device(device)
    check_device(STAGES[stage], where)
    place = where.name
    operands = _at(place, operands)
    mask = _mask(causal, key_mask, operands[0], N_k, place)
    mask = _sparse(_dropping(mask, dropout_p, seed), block_mask, sides, N, N_k, place)
    if out is not None:
        _check_lse(operands[-1], mask, N, N_k)

    q, k = operands[:2]
    if N == 0:  # nothing to launch, and nothing that any key had an influence on
        dQ = engine.empty(q.shape, dtype, place)
        dK, dV = (engine.to_device(np.zeros(k.shape, dtype), place) for _ in range(2))
    else:
        Q, K, V, dO = (_as_heads(operand, place) for operand in operands[:4])
        O = _as_heads(operands[4], place) if out is not None else None
        L = _as_heads(operands[5], place, columns=0) if out is not None else None
        backward = STAGES[stage].backward if deterministic else STAGES[stage].backward_atomic
        dQ, dK, dV = backward(Q, K, V, dO, scale, O=O, L=L, mask=mask, blocks=blocks, device=place)
    return tuple(_result(dX, x.shape, q) for dX, x in ((dQ, q), (dK, k), (dV, k)))


AUTO = "auto"


SETTLED = 1000  # more kinds of calls than that are rare
_settled = {}  # a kind of call, as `_known` describes it -> what runs it, with which numbers, on which shapes


def _known(arrays, flags, device):
    """What a call on contiguous device arrays has in common with every other that is checked and launched alike.

    None for other arrays, on several GPUs, and for what no dictionary finds. In small calls checks take long.
    """
    plain = all(type(x).__name__ == "DeviceNDArray" and x.is_c_contiguous() for x in arrays)
    if not plain or engine.gpu_count() != 1:
        return None
    kinds = tuple(map(type, flags))  # True is 1 to a dictionary
    place, forward = engine.device(device).name, getattr(STAGES.get(str(flags[0])), "forward", None)
    known = place, forward, flags, kinds, *((x.shape, x.dtype) for x in arrays)
    try:
        hash(known)
    except TypeError:
        return None
    return known


class _Operand(NamedTuple):
    """An array that a caller gave, and what the checks need to know of it, wherever its memory is.

    bfloat16 has the dtype BFLOAT16; `given`: the caller's own.
    """

    name: str
    array: Any
    shape: tuple
    dtype: np.dtype
    on_device: bool
    given: np.dtype | None = None


# ----------------------------------------------------------------------------------------------- what the arguments are


def _operands(arrays):
    """The named arrays as operands: of one floating dtype that a kernel can read."""
    operands = [_operand(name, x) for name, x in arrays.items()]
    for operand in operands:
        _check_dtype(operand, operands[0])
    return operands


def _operand(name, x, example="np.float32"):
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, whose mask attention would ignore: pass {name}.filled(0), or a part of it"
        )
    if isinstance(x, np.ndarray):
        array = np.asarray(x)
        if x.dtype.name == "bfloat16":  # ml_dtypes'
            array = array.view(BFLOAT16)
        return _Operand(name, array, x.shape, array.dtype, False, x.dtype)
    if getattr(x, "__cuda_ndarray__", False):  # Numba's own, or its simulator's
        return _Operand(name, x, tuple(x.shape), x.dtype, True)
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None:
        return _Operand(name, x, tuple(interface["shape"]), np.dtype(interface["typestr"]), True)
    raise TypeError(
        f"{name}={reprlib.repr(x)} is a {type(x).__name__}: pass a NumPy array, for example "
        f"np.asarray({name}, dtype={example}), or an array in GPU memory"
    )


def _check_dtype(operand, q):
    name, dtype = operand.name, operand.dtype
    if name_of(dtype) not in DTYPES or not dtype.isnative:
        real = ".real" if dtype.kind == "c" else ""
        raise TypeError(
            f"{name} has dtype {dtype}: attention takes {', '.join(DTYPES[:-1])} and {DTYPES[-1]}, so convert it, for "
            f"example {name}{real}.astype(np.float32)"
        )
    wanted = lse_dtype(q.dtype) if name == "lse" else q.dtype
    if dtype != wanted:
        to = "ml_dtypes.bfloat16" if wanted == BFLOAT16 else f"np.{wanted}"
        why = "" if wanted == q.dtype else f", which goes with lse in {wanted}"
        raise TypeError(
            f"{name} has dtype {name_of(dtype)}, but q has {name_of(q.dtype)}{why or ': give all one dtype'}"
            f"{':' if why else ','} for example {name}.astype({to})"
        )


def _stage(stage, needs, blocks, q, device):
    """The name of the stage that runs; "auto" is asked for the fastest."""
    if stage != AUTO:
        check_takes(STAGES[stage], needs, q.shape)
        return stage
    if blocks is not None and not needs.sparse:
        raise ValueError(f"blocks={blocks!r}: tiles belong to a stage, and stage='auto' may take any; name the stage")
    return fastest(needs, engine.device(device)).name


def _sizes(q, k, v):
    """(H, N, N_k, d) with H the heads of the whole batch; ValueError when the shapes are no attention."""
    for operand in (q, k, v):
        if len(operand.shape) not in (2, 3, 4):
            raise ValueError(
                f"{operand.name} has shape {operand.shape}: pass (N, d), (heads, N, d) or (batch, heads, N, d)"
            )
        if len(operand.shape) != len(q.shape):
            raise ValueError(
                f"{operand.name} has shape {operand.shape}, but q has {q.shape}: give all one number of axes"
            )
    N, d = q.shape[-2:]
    if not 1 <= d <= MAX_D:
        raise ValueError(f"q has shape {q.shape}, so d = {d}: the last axis must hold 1 to {MAX_D} features")
    for operand in (k, v):
        if operand.shape[-1] != d:
            raise ValueError(
                f"{operand.name} has shape {operand.shape} with d = {operand.shape[-1]}, but q has d = {d}: "
                "give all three the same last axis"
            )
    if k.shape != v.shape:
        raise ValueError(
            f"k has shape {k.shape}, but v has {v.shape}: each key needs its value, so give both one shape"
        )
    _check_heads(q, k)
    return math.prod(q.shape[:-2]), N, k.shape[-2], d


def _check_results(q, results):
    """dout and out are shaped like q, lse like q without its last axis."""
    for result in results:
        shape = q.shape[:-1] if result.name == "lse" else q.shape
        if result.shape != shape:
            raise ValueError(f"{result.name} has shape {result.shape}: with q {q.shape} it must be {shape}")


def _mask(causal, key_mask, q, N_k, place):
    """The mask as stages take it."""
    truth("causal", causal)
    if key_mask is None:
        return replace(no_mask(place), causal=True) if causal else no_mask(place)
    keys = _operand("key_mask", key_mask, "bool")
    B = q.shape[0] if len(q.shape) == 4 else 1
    shape = (B, N_k) if len(q.shape) == 4 else (N_k,)
    if keys.dtype != np.bool_:
        raise TypeError(f"key_mask has dtype {keys.dtype}: pass booleans, True for a key that is seen")
    if keys.shape != shape:
        raise ValueError(f"key_mask has shape {keys.shape}: with q {q.shape} and {N_k} keys it must be {shape}")
    if N_k == 0:
        return replace(no_mask(place), causal=bool(causal))
    return replace(no_mask(place), causal=bool(causal), keys=_bytes(keys, (B, N_k), place), masked=True)


def _bytes(mask, shape, place):
    """A boolean operand as kernels see it, one byte each; what is contiguous on the device is not copied."""
    if not mask.on_device:
        return engine.to_device(np.ascontiguousarray(mask.array).view(np.uint8).reshape(shape), place)
    _check_place(mask, place)
    return _as_heads(mask._replace(array=_numba_array(mask.array)), place, columns=0).view(np.uint8)


def _dropping(mask, dropout_p, seed):
    """The mask with dropout."""
    seed, p_drop = seed_of_64_bits(seed), np.float64(probability("dropout_p", dropout_p))
    return replace(mask, seed=seed, p_drop=p_drop) if p_drop else mask


def _sparse(mask, block_mask, blocks, N, N_k, place):
    """The mask with tiles that are left out."""
    if block_mask is None:
        return mask
    given = _operand("block_mask", block_mask, "bool")
    boolean_tiles(given, blocks, N, N_k)
    if 0 in given.shape:
        return mask
    return replace(mask, blocks=_bytes(given, given.shape, place), sides=tuple(blocks))


def _check_lse(lse, mask, N, N_k):
    """ValueError where lse is not finite although its row sees a key, or is NaN or +∞."""
    values = engine.to_host(lse.array)
    if np.isfinite(values).all():
        return
    key_mask = engine.to_host(mask.keys) if mask.masked else None
    block_mask = engine.to_host(mask.blocks) if mask.sides else None
    sees = rows_with_keys(N, N_k, mask.causal, key_mask, block_mask, mask.sides)  # (N,), or (B, N)
    if sees.ndim == 2:
        sees = sees[:, None] if values.ndim == 3 else sees[0]  # of each batch, for all its heads; or of the only one
    sees = np.broadcast_to(sees, values.shape)
    wrong = np.where(sees, ~np.isfinite(values), ~np.isneginf(values))
    if wrong.any():
        at = tuple(map(int, np.argwhere(wrong)[0]))
        has = "a row with keys has a finite lse" if sees[at] else "a row without keys has −∞"
        raise ValueError(
            f"lse{list(at)} is {values[at]}, and {has}: pass what attention(..., return_lse=True) gave for this "
            "q, k, v, scale and mask; if you did, q or k holds values that are not finite, or whose products overflow"
        )


def _check_grid(stage, blocks, lengths):
    """ValueError where a stage with tiles of scores needs more of them in one direction than a grid has blocks."""
    if STAGES[stage].fused:
        return
    side = blocks.Br if blocks else SIDE
    for name, length in lengths.items():
        if length > side * model.GRID_YZ:
            raise ValueError(
                f"{name} has length {length:,}: stage {stage!r} reaches {side * model.GRID_YZ:,} of them, with "
                f"{model.GRID_YZ:,} blocks of {side}; pass stage='flash2', or a part of {name}"
            )


def _check_heads(q, k):
    for operand in (q, k):
        if 0 in operand.shape[:-2]:
            raise ValueError(f"{operand.name} has shape {operand.shape}, which holds no heads: pass at least one")
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"k has shape {k.shape}, but q has {q.shape}: give both the same batch, the first axis")
    if len(q.shape) > 2 and q.shape[-3] % k.shape[-3]:
        raise ValueError(
            f"k and v have {k.shape[-3]} heads, but q has {q.shape[-3]}: the heads of k and v must divide those of q"
        )
    if math.prod(q.shape[:-2]) > model.GRID_YZ:
        raise ValueError(
            f"q has shape {q.shape}, {math.prod(q.shape[:-2]):,} heads over the batch: a CUDA grid holds "
            f"{model.GRID_YZ:,}, so call attention for parts of the batch, with dropout each with a seed of its own"
        )


def _scale(scale, d, dtype):
    """The scale as a number of `dtype`, for halves float32: a Python float would make a kernel compute in float64."""
    dtype = lse_dtype(dtype)
    if scale is None:
        return dtype.type(1 / math.sqrt(d))
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"scale={reprlib.repr(scale)} is a {type(scale).__name__}: pass a float, or None for 1/√d")
    try:
        with np.errstate(over="ignore"):
            rounded = dtype.type(scale)
    except OverflowError:  # an integer beyond all floats
        rounded = dtype.type(math.inf)
    if not np.isfinite(rounded):
        raise ValueError(
            f"scale={reprlib.repr(scale)} is not finite in {dtype}: pass a finite number, or None for 1/√d"
        )
    return rounded


def _check_64_bit(H, N, N_k, d, dtype):
    for what, elements in (("q", H * N * d), ("k", H * N_k * d), ("the scores, heads × N_q × N_k,", H * N * N_k)):
        if elements * dtype.itemsize >= 2**63:
            raise ValueError(
                f"{what} would hold {elements:,} elements, more than 64-bit addresses reach: shorten q or k"
            )


# ------------------------------------------------------------------------------------------------------ where they are


def _at(place, operands):
    """The operands, checked to be where `place` can use them; arrays in device memory as Numba's device arrays."""
    q = operands[0]
    for operand in operands:
        _check_place(operand, place)
        if operand.on_device != q.on_device:
            where = {True: "in GPU memory", False: "a NumPy array"}
            raise TypeError(
                f"{operand.name} is {where[operand.on_device]}, but q is {where[q.on_device]}: bring all to one "
                "side with numba_flash.to_device or numba_flash.to_host"
            )
    if q.on_device:
        operands = [operand._replace(array=_numba_array(operand.array)) for operand in operands]
    _check_memory(place, operands)
    return operands


def _check_place(operand, place):
    if operand.on_device and place == "cpu":
        raise TypeError(
            f"{operand.name} is in GPU memory, but the kernels run on the CPU: copy it first, "
            f"numba_flash.to_host({operand.name}), or pass device='gpu'"
        )


def _numba_array(x):
    if getattr(x, "__cuda_ndarray__", False):
        return x
    from numba import cuda  # not at the top: it looks for a GPU

    return cuda.as_cuda_array(x)


def _check_memory(place, operands):
    """OutOfMemory, before anything is allocated, where the copies that must be made do not fit."""
    strided = [operand for operand in operands if not _is_contiguous(operand)]
    on_device = operands[0].on_device
    if strided and not on_device:
        engine.refuse_if_too_large(_total(strided), f"a contiguous copy of {_names(strided)}", "cpu")
    copied = strided if on_device else operands
    if copied and place != "cpu":
        engine.refuse_if_too_large(_total(copied), f"a copy of {_names(copied)} on the device", place)


def _names(operands):
    *most, last = (operand.name for operand in operands)
    return f"{', '.join(most)} and {last}" if most else last


def _total(operands):
    return sum(math.prod(operand.shape) * operand.dtype.itemsize for operand in operands)


def _is_contiguous(operand):
    if operand.on_device:
        return operand.array.is_c_contiguous()
    return operand.array.flags.c_contiguous and operand.array.flags.aligned


def _as_heads(operand, place, columns=1):
    """The array as kernels see it, (heads, length, d), contiguous and where they run; copied only where it must be.

    columns=0: it has no axis of columns, and becomes (heads, length).
    """
    inner = operand.shape[-1 - columns :]
    shape = (math.prod(operand.shape[: -len(inner)]), *inner)
    if not operand.on_device:
        array = np.require(operand.array, requirements=("C", "A")).reshape(shape)
        return array if place == "cpu" else engine.to_device(array, place)
    if _is_contiguous(operand):
        return engine.reshaped(operand.array, shape)
    bits = np.dtype(np.uint16) if operand.dtype.itemsize == 2 else operand.dtype  # Numba copies no bfloat16
    array = engine.empty(operand.shape, bits, place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Numba's, about the small grid of its own copying kernel
        array[:] = operand.array.view(bits)
    return array.view(operand.dtype).reshape(shape)


def _result(array, shape, q):
    """A result where q is; bfloat16 in host memory in the dtype in which q was given."""
    if q.on_device:
        return engine.reshaped(array, shape)
    array = engine.to_host(array).reshape(shape)
    return array.view(q.given) if array.dtype == BFLOAT16 else array
