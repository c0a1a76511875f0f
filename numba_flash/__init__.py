"""FlashAttention in plain Numba CUDA kernels: a course in which every claim about memory traffic is counted."""

from . import errors, testing
from .attention import attention
from .engine.launch import device, empty, launch, to_device, to_host
from .hbm.ledger import ledger
from .hbm.predict import flops, predict
from .stages import STAGES

__all__ = [
    "STAGES",
    "attention",
    "device",
    "empty",
    "errors",
    "flops",
    "launch",
    "ledger",
    "predict",
    "testing",
    "to_device",
    "to_host",
]
__version__ = "0.1.0"
