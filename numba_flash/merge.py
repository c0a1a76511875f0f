"""Two parts of one attention made whole: what lets tiles, splits of the keys and GPUs each do a part."""

import numpy as np


def merge(out_1, lse_1, out_2, lse_2):
    """The attention over all keys from the attentions over two parts of them -> (out, lse).

    out_1, out_2: (..., N, d), and lse_1, lse_2: (..., N), of the same queries, NumPy arrays of one dtype, float32 or
    float64; lse is the natural logarithm of the sum of exp(S), −∞ for a row without keys. In float64 inside, rounded
    once. Associative and commutative, so any split of the keys gives the same result up to rounding:
    L = log(exp(L₁) + exp(L₂)), O = exp(L₁ − L) O₁ + exp(L₂ − L) O₂, which follows from the merge of (m, l) in Milakov &
    Gimelshein 2018, arXiv:1805.02867.

    Raises TypeError for anything but such arrays, ValueError for shapes that do not fit or for lse of NaN or +∞.
    """
    arrays = {"out_1": out_1, "lse_1": lse_1, "out_2": out_2, "lse_2": lse_2}
    for name, array in arrays.items():
        _check(name, array, out_1)
    out_1, lse_1, out_2, lse_2 = arrays.values()
    if out_1.ndim < 2 or out_2.shape != out_1.shape:
        raise ValueError(f"out_1 has shape {out_1.shape}, out_2 {out_2.shape}: pass two of the same shape (..., N, d)")
    for name in ("lse_1", "lse_2"):
        lse = arrays[name]
        if lse.shape != out_1.shape[:-1]:
            raise ValueError(f"{name} has shape {lse.shape}: with out_1 {out_1.shape} it must be {out_1.shape[:-1]}")
        if np.isnan(lse).any() or np.isposinf(lse).any():
            raise ValueError(f"{name} holds NaN or +∞, which is no logarithm of a sum of exponentials")
    L_1, L_2 = lse_1.astype(np.float64), lse_2.astype(np.float64)
    m = np.maximum(L_1, L_2)
    m = np.where(np.isneginf(m), 0, m)  # a row without keys in either part: both weights are exp(−∞) = 0
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # outputs of ∞ or NaN; l = 0
        weights = [np.exp(L - m) for L in (L_1, L_2)]
        l = weights[0] + weights[1]
        shares = [np.divide(w, l, out=np.zeros_like(w), where=w > 0)[..., None] for w in weights]
        out = sum(np.where(share > 0, share * O, 0) for share, O in zip(shares, (out_1, out_2), strict=True))
        return out.astype(out_1.dtype), (m + np.log(l)).astype(lse_1.dtype)


def _check(name, array, first):
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray | np.matrix):
        raise TypeError(
            f"{name} is a {type(array).__name__}: pass a NumPy array (numba_flash.to_host copies from a GPU)"
        )
    if array.dtype not in (np.float32, np.float64) or array.dtype != getattr(first, "dtype", None):
        raise TypeError(f"{name} has dtype {array.dtype}: give all four the same, float32 or float64")
