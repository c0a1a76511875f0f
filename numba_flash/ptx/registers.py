"""setmaxnreg: a warp group hands registers back, so that another may have more (sm_90a).

PTX ISA manual, "Miscellaneous Instructions: setmaxnreg". What moves is what the block was launched with, threads times
registers of a thread: 384 × 168 = 64,512 allow two groups of 232 beside one of 40. A group that asks for more than was
handed back waits for ever. ptxas heeds it only in a kernel with launch_bounds. All 128 threads of a group call it.
"""

from functools import cache

from .inline import instruction, u32


@cache
def make_raise(registers):
    @instruction(f"setmaxnreg.inc.sync.aligned.u32 {registers};")
    def raise_limit():
        """Each thread of this warp group has `registers` from now on, a multiple of 8 up to 256; it waits for them."""

    return raise_limit


@cache
def make_lower(registers):
    @instruction(f"setmaxnreg.dec.sync.aligned.u32 {registers};")
    def lower_limit():
        """Each thread of this warp group keeps `registers`, a multiple of 8 from 24 on."""

    return lower_limit


@instruction("mov.u32 $result, %laneid;")
def lane_now() -> u32:
    """This thread's place in its warp, 0 to 31, read anew each time: what is computed from it is computed there, and
    takes no register in a loop around it. PTX ISA manual, "Special Registers: %laneid".
    """
