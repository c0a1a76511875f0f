"""How a kernel runs: on a GPU, compiled for the CPU, or on the simulator of Numba."""
