"""torch's scaled_dot_product_attention, beside which our stages are timed. No other module imports torch.

torch and Numba both put their work on the default stream of the GPU, which does one thing after the other: so what
either has made the other can read, and one pair of CUDA events times both. Arrays pass from Numba to torch by
`__cuda_array_interface__`, without a copy.
"""

import re
import warnings
from typing import NamedTuple

INSTALL = 'python -m pip install -e ".[peers]"'


class Peer(NamedTuple):
    """One backend of scaled_dot_product_attention, by its name in torch.nn.attention.SDPBackend, and what it takes.

    matmul: the rate of a matmul that bounds it. None has EFFICIENT_ATTENTION: it forms each product of float32 from
    three of TF32 on tensor cores (OpMultiplyAddFastF32 in PyTorch's mem_eff_attention), and no flag turns that off.
    """

    backend: str
    dtype: str
    matmul: str | None


PEERS = {
    "torch math": Peer("MATH", "float32", "float32"),
    "torch efficient": Peer("EFFICIENT_ATTENTION", "float32", None),
    "torch FA2": Peer("FLASH_ATTENTION", "float16", "float16"),
    "torch cuDNN": Peer("CUDNN_ATTENTION", "float16", "float16"),
}
MATMULS = {  # how torch multiplies: the dtype, and the precision within float32
    "float32": ("float32", "highest"),
    "TF32": ("float32", "high"),
    "float16": ("float16", "highest"),
}


def load(place="cuda"):
    """torch, ready to run on `place` -> (Torch, None), or (None, a sentence that says what is missing)."""
    try:
        import torch
        import torch.nn.attention
    except Exception as error:  # a build that does not fit raises anything
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return None, f"torch is not installed, so there are no peers and no rate of a matmul: {INSTALL}"
        return None, f"torch cannot be imported ({first_line(error)}), so there are no peers: {INSTALL}"
    if place == "cuda" and not torch.cuda.is_available():
        return None, f"torch {torch.__version__} sees no GPU, so there are no peers: install a build of it with CUDA"
    torch.set_float32_matmul_precision("highest")  # TF32 is used where this module says so alone
    return Torch(torch, place), None


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Torch:
    """torch on one device."""

    def __init__(self, torch, place):
        self.torch, self.place, self.version = torch, place, torch.__version__

    def share(self, x, dtype):
        """A tensor with the elements of the array `x`: the same memory where its dtype is the same."""
        return self.torch.as_tensor(x, device=self.place).to(getattr(self.torch, dtype))

    def to_host(self, x):
        return x.detach().float().cpu().numpy()

    def attention(self, name, q, k, v, causal):
        """What the peer `name` gives for tensors (batch, heads, N, d)."""
        functional, attention = self.torch.nn.functional, self.torch.nn.attention
        with attention.sdpa_kernel(getattr(attention.SDPBackend, PEERS[name].backend)):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def gradients(self, name, q, k, v, dout, causal):
        """Run the forward pass -> a function that runs the backward pass alone and returns dq, dk, dv."""
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = self.attention(name, *leaves, causal)
        return lambda: self.torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def give_back(self):
        """Return to the driver the memory that torch keeps although nothing is in it."""
        if self.place == "cuda":
            self.torch.cuda.empty_cache()

    def matmuls(self, side):
        """A work for each of MATMULS, the product of two square matrices."""
        return {name: self._matmul(side, *how) for name, how in MATMULS.items()}

    def _matmul(self, side, dtype, precision):
        A, B = (self.torch.randn(side, side, dtype=getattr(self.torch, dtype), device=self.place) for _ in range(2))

        def work():
            self.torch.set_float32_matmul_precision(precision)
            try:
                return A @ B
            finally:
                self.torch.set_float32_matmul_precision("highest")

        return work


def why_not(error, warned, n):
    """Why a peer cannot run, in a sentence, from what torch raised and the warnings before it."""
    text = " ".join(str(error).split())
    if "out of memory" in text:
        asked = re.match(r".*? is free", text)
        return f"{asked[0] if asked else first_line(error)}; --n {max(n // 2, 1)} needs a quarter for N × N matrices"
    reasons = [str(warning.message).partition(" (Triggered")[0].strip() for warning in warned]
    reasons = [reason for reason in reasons if not re.search("not used because|runtime disabled", reason)]
    return " ".join([text.partition(". ")[0].rstrip("."), *(f"({reason.rstrip('.')})" for reason in reasons[:1])])


def caught():
    """A list of the warnings in the body, none of which is printed."""
    return warnings.catch_warnings(record=True, action="always")
