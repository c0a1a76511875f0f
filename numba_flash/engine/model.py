"""The device that the CPU engine and the default block sizes model: the limits of an A100, per block.

`STATIC_SHARED` and `DYNAMIC_SHARED` are bytes of shared memory, sized at compile time and at launch; `REGISTERS` are
32-bit registers; `THREADS` is the number of threads, `WARP` that of a warp. `BLOCK_Z`, `GRID_X` and `GRID_YZ` are what
CUDA allows any launch.
"""

STATIC_SHARED = 49_152
DYNAMIC_SHARED = 166_912
REGISTERS = 65_536
THREADS = 1024
WARP = 32
BLOCK_Z = 64
GRID_X = 2**31 - 1
GRID_YZ = 65_535
