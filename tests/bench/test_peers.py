"""torch as a peer: what is said where it is missing, and, where it is installed, that its results are attention."""

import sys
import types
import warnings

import numpy as np
import pytest

from numba_flash import reference
from numba_flash.bench import peers
from numba_flash.testing import inputs


def fake(monkeypatch, available):
    attention = types.ModuleType("torch.nn.attention")
    torch, nn = types.ModuleType("torch"), types.ModuleType("torch.nn")
    torch.nn, nn.attention, torch.__version__ = nn, attention, "9.9"
    torch.cuda = types.SimpleNamespace(is_available=lambda: available)
    torch.precision = []
    torch.set_float32_matmul_precision = torch.precision.append
    torch.randn = lambda *shape, dtype, device: np.ones(shape, dtype)
    torch.float32, torch.float16 = np.float32, np.float16
    for module in (torch, nn, attention):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return torch


def test_without_torch_the_way_to_install_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    torch, why = peers.load()
    assert torch is None
    assert why.startswith("torch is not installed, so there are no peers")
    assert why.endswith('python -m pip install -e ".[peers]"')


def test_a_torch_that_is_broken_or_sees_no_gpu_is_a_sentence(monkeypatch):
    fake(monkeypatch, available=False)
    assert peers.load() == (None, "torch 9.9 sees no GPU, so there are no peers: install a build of it with CUDA")
    broken = types.SimpleNamespace(find_spec=lambda name, path, target=None: boom(name))

    def boom(name):
        if name.startswith("torch"):
            raise OSError("libcudart.so.13: cannot open\nmore")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [broken, *sys.meta_path])
    torch, why = peers.load()
    assert torch is None
    assert why.startswith("torch cannot be imported (libcudart.so.13: cannot open), so there are no peers")


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, SystemError, ImportError])
def test_whatever_torch_raises_is_a_sentence(monkeypatch, error):
    def spoilt(name, path, target=None):
        if name == "torch":
            raise error("_ARRAY_API not found\nmore")

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [types.SimpleNamespace(find_spec=spoilt), *sys.meta_path])
    says = f"torch cannot be imported (_ARRAY_API not found), so there are no peers: {peers.INSTALL}"
    assert peers.load() == (None, says)


def test_tf32_is_on_for_its_own_matmul_alone(monkeypatch):
    torch = fake(monkeypatch, available=True)
    ours, why = peers.load()
    assert why is None
    assert torch.precision == ["highest"]
    works = ours.matmuls(2)
    assert list(works) == ["float32", "TF32", "float16"]
    results = {name: work() for name, work in works.items()}
    assert torch.precision[1:] == ["highest", "highest", "high", "highest", "highest", "highest"]
    assert [result.dtype for result in results.values()] == [np.float32, np.float32, np.float16]


def test_why_a_peer_cannot_run():
    warned = [
        warnings.WarningMessage(message, UserWarning, "x.py", 1)
        for message in (
            "Flash attention kernel not used because: (Triggered internally at x.cpp)",
            "Expected query to be Half. (Triggered internally at y.cpp)",
        )
    ]
    why = peers.why_not(RuntimeError("No available kernel. Aborting execution."), warned, 64)
    assert why == "No available kernel (Expected query to be Half)"
    text = "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a capacity of 9 GiB of which 2.1 GiB is free. Of"
    why = peers.why_not(RuntimeError(text), [], 4096)
    assert why.endswith("of which 2.1 GiB is free; --n 2048 needs a quarter for N × N matrices")
    with peers.caught() as caught:
        warnings.warn("seen", UserWarning, stacklevel=1)
    assert [str(one.message) for one in caught] == ["seen"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "limit"), [("torch math", 1e-5), ("torch FA2", 2e-2)])
def test_torch_on_the_cpu(name, limit, causal):
    pytest.importorskip("torch")
    torch, why = peers.load("cpu")
    assert why is None
    q, k, v = inputs((1, 2, 40, 8), (1, 2, 40, 8))
    dout = np.random.default_rng(1).standard_normal(q.shape, np.float32)
    tensors = [torch.share(x, peers.PEERS[name].dtype) for x in (q, k, v, dout)]
    out = torch.to_host(torch.attention(name, *tensors[:3], causal))
    assert np.abs(out - reference.attention(q, k, v, causal=causal)[0]).max() < limit * 5
    backward = torch.gradients(name, *tensors, causal)
    for _ in range(2):
        gradients = map(torch.to_host, backward())
        for found, expected in zip(gradients, reference.attention_backward(q, k, v, dout, causal=causal), strict=True):
            assert np.abs(found - expected).max() < limit * np.abs(expected).max() * 5


def test_torch_shares_the_memory_of_an_array():
    pytest.importorskip("torch")
    torch, _ = peers.load("cpu")
    x = np.zeros(3, np.float32)
    tensor = torch.share(x, "float32")
    x[1] = 7
    assert tensor[1] == 7
