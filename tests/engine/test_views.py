"""Views, tuple targets, tuples, len and augmented assignment work and count alike on every device the tests run on."""

import numpy as np
import pytest

import numba_flash as nf

from .view_kernels import CASES


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_counts_and_results(case, strict):
    host = case.arguments()
    args = [nf.to_device(a) if isinstance(a, np.ndarray) else a for a in host]
    with nf.ledger() as bill:
        if strict:
            nf.launch(case.kernel, case.grid, case.block, *host, device="cpu", strict=True)
        else:
            nf.launch(case.kernel, case.grid, case.block, *args)
    ((name, tensors),) = bill.kernels.items()
    assert name == getattr(case.kernel, "py_func", None).__name__
    assert {t: (c.loads, c.stores, c.atomics) for t, c in tensors.items()} == case.counts
    names = list(tensors)
    arrays = host if strict else [nf.to_host(a) for a in args if hasattr(a, "shape") and a.shape]
    for tensor, want in case.results.items():
        np.testing.assert_array_equal(arrays[names.index(tensor)], want)
