"""Checks of arguments that several public functions share. Each error names the argument, its value and the way out."""

import difflib
import operator
import reprlib
from numbers import Real

import numpy as np

from .dtypes import DTYPES, name_of
from .engine.model import GRID_YZ

BOOLEANS = bool, np.bool_


def integer(name, value, least=0):
    """`value` as a Python int. TypeError where it is no integer (a bool is none), ValueError below `least`."""
    try:
        if isinstance(value, BOOLEANS):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is not an integer: pass an int, {least} or more") from None
    if number < least:
        raise ValueError(f"{name}={number} is too small: pass {least} or more")
    return number


def truth(name, value):
    """`value` as a bool; TypeError where it is none."""
    if not isinstance(value, BOOLEANS):
        raise TypeError(f"{name}={value!r} is not a truth value: pass True or False")
    return bool(value)


def check_deterministic(stage, deterministic):
    """ValueError where a Stage has no backward pass with atomics."""
    if not deterministic and stage.backward_atomic is None:
        raise ValueError(
            f"deterministic={deterministic!r}: stage {stage.name!r} has no variant with atomics; leave it True, or "
            "pass stage='flash2'"
        )


def probability(name, value):
    """`value` as a float from 0 to below 1; TypeError where it is no number, ValueError where it is another."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={reprlib.repr(value)} is a {type(value).__name__}: pass a float")
    if not (0 <= value < 1 and float(value) < 1):
        shown = reprlib.repr(value)
        raise ValueError(f"{name}={shown} is no probability to drop a weight: pass 0 or more, and less than 1")
    return float(value)


def seed_of_64_bits(seed):
    """`seed` as a uint64; ValueError where it is none."""
    if integer("seed", seed) >= 2**64:
        raise ValueError(f"seed={reprlib.repr(seed)} is too large: pass one below 2**64")
    return np.uint64(seed)


def check_split(stage, split_kv, block_mask, dropout_p):
    """`split_kv` as an int. ValueError beyond a grid, for a Stage without it, with a block mask and with dropout."""
    splits = integer("split_kv", split_kv, 1)
    if splits > GRID_YZ:
        raise ValueError(
            f"split_kv={splits} is too large: pass at most {GRID_YZ:,}, as many blocks as a CUDA grid holds"
        )
    if stage.forward_split is None:
        raise ValueError(f"split_kv={splits}: stage {stage.name!r} does not split the keys; pass stage='flash2'")
    if block_mask is not None:
        raise ValueError(f"split_kv={splits} and block_mask do not go together: leave one out")
    if probability("dropout_p", dropout_p):
        raise ValueError(f"dropout_p={dropout_p!r}: split_kv is for decoding, where nothing is dropped; leave one out")
    return splits


def check_sparse(stage):
    """ValueError where a Stage takes no block mask."""
    if not stage.block_mask:
        raise ValueError(f"block_mask is given, but stage {stage.name!r} leaves out no tiles: pass stage='flash2'")


def itemsize(dtype):
    """Bytes of one element of `dtype`, which `dtype_name` explains."""
    return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[dtype_name(dtype)]


def dtype_name(dtype, dtypes=DTYPES):
    """The name of `dtype` (a name, or what numpy.dtype takes). ValueError where it is none of `dtypes`."""
    try:
        name = name_of(dtype)
    except (TypeError, ValueError):
        name = None
    if name not in dtypes:
        *most, last = map(repr, dtypes)
        raise ValueError(f"dtype={dtype!r} is not one the stages compute in: pass {', '.join(most)} or {last}")
    return name


def check_stage(stage, stages):
    """Raise a ValueError that lists `stages` and the nearest, if `stage` is unknown; a TypeError if it is no name."""
    names = ", ".join(map(repr, stages))
    if not isinstance(stage, str):
        raise TypeError(f"stage={stage!r} must be the name of a stage: one of {names}")
    if stage not in stages:
        near = difflib.get_close_matches(stage.lower(), stages, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"stage={stage!r} is unknown: use one of {names}{hint}")
