"""What lessons 10, 12 and 13 say that was measured: on one NVIDIA H200, 2026-11-30, in float32, with these versions.

To measure anew, on a GPU: DRAM by `python -m numba_flash figures left --measure`, the stages' times by `figures left`,
rates and PyTorch's times by `bench`. The rest of Kernel and Inside are metrics of Nsight Compute, named below:
`ncu --clock-control none --metrics METRIC,… python FILE`, where FILE calls `nf.attention` once. ncu empties the caches
before each kernel. Two runs differ by up to 2 % in bytes of DRAM, and by less in times.
"""

from typing import NamedTuple

VERSIONS = {"torch": "2.11.0", "numba-cuda": "0.30.4"}
L2, PROCESSORS, SHARED, WARPS = 62_914_560, 132, 233_472, 64  # bytes; multiprocessors; of one: bytes, warps at most
COPY, MATMUL, HALF = 4238e9, 51.3e12, 774e12  # `bench`: bytes/s, read and written; FLOP/s, float32 and float16


class Kernel(NamedTuple):
    """A kernel of the forward pass: ms; bytes that DRAM read and wrote; % of the peak that units reached."""

    ms: float  # gpu__time_duration.sum
    read: int  # dram__bytes_read.sum
    written: int  # dram__bytes_write.sum
    l1: float  # l1tex__throughput, .avg.pct_of_peak_sustained_elapsed, as the next three
    l2: float  # lts__throughput
    dram: float  # dram__throughput
    issued: float  # sm__inst_issued: slots in which an instruction started


# N = 1,024, d = 64, 1,024 heads: the paper's configuration
KERNELS = {
    "naive": {
        "scores": Kernel(149.05, 540_019_968, 4_274_626_816, 99.9, 4.6, 0.7, 50.3),
        "softmax": Kernel(61.23, 50_794_457_600, 17_952_790_528, 27.1, 47.4, 23.3, 6.1),
        "output": Kernel(104.04, 4_565_202_688, 271_723_776, 23.8, 5.1, 1.0, 74.9),
    },
    "tiled": {
        "scores": Kernel(42.50, 537_894_400, 4_271_838_464, 97.6, 8.5, 2.4, 34.6),
        "softmax": Kernel(61.32, 50_677_240_320, 17_926_981_376, 27.0, 47.2, 23.3, 6.1),
        "output": Kernel(18.93, 4_563_597_312, 269_186_816, 83.5, 19.5, 5.3, 70.2),
    },
    "online_softmax": {
        "scores": Kernel(42.41, 538_116_352, 4_271_774_976, 97.6, 8.5, 2.4, 34.6),
        "statistics": Kernel(9.10, 5_721_049_344, 10_662_144, 45.2, 49.8, 13.1, 15.4),
        "output": Kernel(22.57, 4_572_095_232, 269_054_464, 72.3, 16.1, 4.5, 67.8),
    },
    "flash": {
        "initialise": Kernel(1.24, 220_885_504, 579_394_560, 41.5, 67.5, 13.4, 3.9),
        "flash": Kernel(29.16, 9_262_417_152, 4_411_521_792, 73.1, 51.7, 9.8, 27.1),
    },
    "flash2": {"flash2": Kernel(14.37, 805_663_488, 263_636_224, 64.4, 7.2, 1.6, 55.8)},
    "register_tiled": {"register_tiled": Kernel(10.37, 805_371_648, 262_573_824, 75.2, 10.3, 2.1, 67.8)},
}
SOFTMAX_WAITS = 209  # cycles that a warp of naive's softmax waits for loads, per instruction (long_scoreboard)
CONFLICTS = 6_539_373_479 / 10_162_470_456  # of the wavefronts of tiled's scores (l1tex__data_bank_conflicts_pipe_lsu)

TIMES = {  # ms, forward and both passes, of the same configuration: medians of `figures left`
    "naive": (321.0, 1007.4),
    "tiled": (129.1, 375.2),
    "online_softmax": (75.1, 327.8),
    "flash": (30.5, 207.8),
    "flash2": (14.4, 114.8),
    "register_tiled": (10.4, 48.1),
}

# N = 4,096, d = 64, 64 heads
BENCH = {  # ms, forward and backward: medians of `bench`; math and efficient are backends of PyTorch's attention
    "math": (15.00, 18.80),
    "efficient": (7.847, 19.47),
    "flash2": (13.89, 102.3),
    "register_tiled": (10.61, 38.67),
}
# flash2, both passes, of the same sizes, `figures right`: a + b·s ms, off by at most; all tiles without a mask, ms;
# share of the tiles -> time as a part of that
SPARSE_LINE, DENSE = (6.0, 115.9, 0.7), 120.3
SPARSE = {0.1: 0.140, 0.5: 0.534, 0.9: 0.910}


class Inside(NamedTuple):
    """What the forward pass of a stage does within a multiprocessor; shared, issued and multiplied in % of the peak."""

    wavefronts: int  # l1tex__data_pipe_lsu_wavefronts_mem_shared.sum
    shared: float  # l1tex__data_pipe_lsu_wavefronts_mem_shared
    issued: float  # sm__inst_issued
    multiplied: float  # sm__pipe_fma_cycles_active
    warps: float  # sm__warps_active.avg.per_cycle_active
    registers: int  # launch__registers_per_thread
    wait: float  # smsp__average_warps_issue_stalled_wait_per_issue_active: cycles for each instruction
    short_scoreboard: float  # and so on
    dram_read: int


INSIDE = {
    "flash2": Inside(2_248_783_253, 62.03, 57.53, 35.92, 7.79, 202, 1.16, 0.40, 207_259_648),
    "register_tiled": Inside(1_740_904_794, 62.92, 65.75, 46.51, 15.53, 124, 0.54, 1.49, 202_215_936),
}
