"""How fast it is: on a GPU the ladder beside torch, elsewhere the CPU engine beside NumPy and Numba's simulator."""

from .command import add_command

__all__ = ["add_command"]
