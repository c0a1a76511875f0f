"""How far float32 may be from a formula, derived from the formula itself: `Rounded` arrays.

A specification runs once on Rounded arrays instead of NumPy's. Each operation then carries along, beside its value in
float64, a bound on the error that float32 makes: first-order running error analysis (Higham, Accuracy and Stability of
Numerical Algorithms, 2002, section 3.3). So no tolerance is chosen by hand.
"""

import numpy as np

U = 2.0**-24  # the relative error of one rounding in float32
TINY = float(np.finfo(np.float32).tiny)  # below the smallest normal number, errors are absolute

ROUNDINGS = 6
"""How often an answer may round where the formula rounds once.

A sum of n terms rounds n − 1 times. An online softmax rescales that sum, at each key in the worst case: a difference
(1 rounding), an exponential (up to 4, see `numba_flash.testing.naive_bound`) and a product (1), and then the sum.
Where the formula is a plain sum or product, this is room to compute it in another way.
"""


class Rounded(np.lib.mixins.NDArrayOperatorsMixin):
    """An array as float64 values, and for each element a bound on |error| in float32. No more NumPy than `_RULES`."""

    def __init__(self, value, error=0.0):
        self.value = np.asarray(value, np.float64)
        error = np.broadcast_to(error, self.value.shape)
        self.error = np.where(np.isfinite(self.value) & ~np.isnan(error), error, 0.0)

    shape = property(lambda self: self.value.shape)
    T = property(lambda self: Rounded(self.value.T, self.error.T))

    def __len__(self):
        return len(self.value)

    def __getitem__(self, index):
        return Rounded(self.value[index], self.error[index])

    def sum(self, axis=None, keepdims=False):
        how = {"axis": axis, "keepdims": keepdims}
        total = self.value.sum(**how)
        terms = self.value.size // max(np.size(total), 1)
        return Rounded(total, self.error.sum(**how) + max(terms - 1, 0) * U * np.abs(self.value).sum(**how))

    def max(self, axis=None, keepdims=False, initial=-np.inf):
        how = {"axis": axis, "keepdims": keepdims}
        return Rounded(self.value.max(initial=initial, **how), self.error.max(initial=0, **how))

    def reshape(self, *shape):
        return Rounded(self.value.reshape(*shape), self.error.reshape(*shape))

    def __array_ufunc__(self, ufunc, method, *inputs, **more):
        if method != "__call__" or more:
            return NotImplemented
        pairs = [x if isinstance(x, Rounded) else Rounded(x) for x in inputs]
        values = [x.value for x in pairs]
        with np.errstate(all="ignore"):
            result = ufunc(*values)
            if result.dtype == bool:
                return result
            if ufunc not in _RULES:
                return NotImplemented
            return Rounded(result, _RULES[ufunc](result, *values, *(x.error for x in pairs)))

    def __array_function__(self, function, types, arguments, more):
        if function is np.where and not more:
            condition, a, b = arguments
            a, b = (x if isinstance(x, Rounded) else Rounded(x) for x in (a, b))
            return Rounded(np.where(condition, a.value, b.value), np.where(condition, a.error, b.error))
        if function in (np.isneginf, np.isfinite):
            return function(arguments[0].value)
        return NotImplemented


def _matmul(r, a, b, da, db):
    rounds = ~np.logical_and.outer(_one_power(a, -1), _one_power(b, 0))
    return np.abs(a) @ db + da @ np.abs(b) + rounds * a.shape[-1] * U * (np.abs(a) @ np.abs(b))


def _multiply(r, a, b, da, db):
    rounds = ~(_power(a) | _power(b))
    return np.abs(a) * db + np.abs(b) * da + rounds * U * np.abs(r)


def _power(x):
    """Where x is ± a power of 2: a product with it is exact in any format with room for its exponent."""
    return np.abs(np.frexp(x)[0]) == 0.5


def _one_power(x, axis):
    """Where all of x along an axis is ± the same power of 2: sums of a few products of such are exact in any order."""
    return (np.abs(x) == np.abs(x).max(axis=axis, keepdims=True)).all(axis=axis) & _power(x).all(axis=axis)


_RULES = {  # the result, the operands and their errors -> the error of the result
    np.add: lambda r, a, b, da, db: da + db + U * np.abs(r),
    np.subtract: lambda r, a, b, da, db: da + db + U * np.abs(r),
    np.multiply: _multiply,
    np.true_divide: lambda r, a, b, da, db: (da + np.abs(r) * db) / np.abs(b) + U * np.abs(r),
    np.matmul: _matmul,
    np.negative: lambda r, a, da: da,
    np.maximum: lambda r, a, b, da, db: np.maximum(da, db),
    np.exp: lambda r, a, da: r * (np.expm1(da) + 4 * U),
    np.log: lambda r, a, da: da / np.abs(a) + 2 * U * np.abs(r) + 4 * U,
}


def joined(x):
    """One Rounded for a list of them."""
    if isinstance(x, Rounded):
        return x
    return Rounded(np.stack([part.value for part in x]), np.stack([part.error for part in x]))


def truth_and_limit(specification, inputs):
    """[(expected in float64, the largest |error| that float32 explains)] for each output of a specification.

    inputs: what of them is float32 is followed. A specification returns an array, a list of its parts, or a tuple of
    outputs. Raises TypeError where it uses NumPy that Rounded does not know.
    """
    given = [Rounded(x) if getattr(x, "dtype", None) == np.float32 else x for x in inputs]
    found = specification(*given)
    outputs = [joined(x) for x in (found if isinstance(found, tuple) else (found,))]
    return [(x.value, ROUNDINGS * x.error + TINY) for x in outputs]
