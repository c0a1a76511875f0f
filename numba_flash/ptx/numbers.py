"""Numbers: two elements of 2 bytes in one register, the fast exponential, the larger of two."""

import math
from functools import cache

from numba import float32

from .inline import device, f32, instruction, u32, vector

LOG2E = math.log2(math.e)


@instruction("ex2.approx.ftz.f32 $result, $x;", pure=True)
def ex2(x: f32) -> f32:
    """2^x, to 2 ulp; exactly 0 where x is −∞. PTX ISA, "ex2"."""


@device
def exp(x):
    """e^x, with an error of 2 ulp and what the rounding of x · log₂ e makes of it; exactly 0 where x is −∞."""
    return ex2(x * float32(LOG2E))


@instruction("max.f32 $result, $x, $y;", pure=True)
def larger(x: f32, y: f32) -> f32:
    """The larger of two; where one is no number, the other. PTX ISA, "max"."""


@cache
def make_pack(kind):
    """pack(low, high): two float32, rounded to nearest, in one register. kind: "f16" or "bf16". PTX ISA, "cvt"."""

    @instruction(f"cvt.rn.{kind}x2.f32 $result, $high, $low;", pure=True)
    def pack(low: f32, high: f32) -> u32:
        """`low` in the lower 16 bits, which is the element of the lower address."""

    return pack


@cache
def make_unpack(kind):
    """unpack(pair): the two elements of a register as (low, high), float32. kind: "f16" or "bf16"."""
    if kind == "f16":
        text = "mov.b32 {low, high}, $pair; cvt.f32.f16 $result[0], low; cvt.f32.f16 $result[1], high;"
    else:  # a bfloat16 is the upper half of a float32
        text = "mov.b32 {low, high}, $pair; mov.b32 $result[0], {zero, low}; mov.b32 $result[1], {zero, high};"

    @instruction("{ .reg .b16 low, high, zero; mov.b16 zero, 0; " + text + " }", pure=True)
    def unpack(pair: u32) -> vector(f32, 2):
        """(low, high)."""

    return unpack


@instruction("lg2.approx.ftz.f32 $result, $x;", pure=True)
def lg2(x: f32) -> f32:
    """log₂ x, to 2^-22 (absolute for x from 0.5 to 2, else relative); −∞ for 0, under fastmath too. PTX ISA, "lg2"."""
