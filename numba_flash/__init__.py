"""FlashAttention in plain Numba CUDA kernels: a course in which every claim about memory traffic is counted."""

from . import errors, patterns, testing
from .attention import attention, attention_backward
from .blocks import choose_blocks
from .choice import choose_stage
from .engine.launch import device, empty, launch, to_device, to_host
from .engine.recorder import recording
from .hbm.ledger import ledger
from .hbm.lines import lines
from .hbm.predict import flops, predict
from .merge import merge
from .stages import STAGES

__all__ = [
    "STAGES",
    "attention",
    "attention_backward",
    "choose_blocks",
    "choose_stage",
    "device",
    "empty",
    "errors",
    "flops",
    "launch",
    "ledger",
    "lines",
    "merge",
    "patterns",
    "predict",
    "recording",
    "testing",
    "to_device",
    "to_host",
]
__version__ = "0.1.0"
