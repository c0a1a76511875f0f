"""The exercise of lesson 11: parts of one row come together."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake, Share
from .common import LOWEST, SENTINEL, cases, normal


def _splits(rng, n, N, d):
    m, l = normal(rng, n, N, size=3.0), 1 + np.abs(normal(rng, n, N, size=5.0))
    O = normal(rng, n, N, d, mean=1.0) * l[:, :, None]
    m[0, 1::5] += 200
    if N > 1:
        m[:, 2::5] -= 300
        m[:, 4::5] = LOWEST
        empty = np.zeros((n, N), bool)
        empty[-1] = True  # more splits than tiles
        empty[:, 3::5] = True
        m[empty], l[empty], O[empty] = -np.inf, 0, 0
    return O, m, l


def _merged(O_s, m_s, l_s, *, m=None, weighted=True, divide=True, guard=True):
    m = m_s.max(axis=0) if m is None else m
    w = np.exp(m_s - (np.where(np.isneginf(m), 0, m) if guard else m)) if weighted else np.ones_like(m_s)
    l = (w * l_s).sum(axis=0)
    O = (w[:, :, None] * O_s).sum(axis=0)
    return O / (np.where(l == 0, 1, l) if guard else l)[:, None] if divide else O


EXERCISES = (
    Exercise(
        name="11_split",
        answer="merge_splits",
        outputs=("O",),
        inputs=cases(
            19,
            _splits,
            {"n": 7, "N": 11, "d": 13},
            {"n": 1, "N": 1, "d": 1},
            {"n": 32, "N": 4, "d": 32},
            {"n": 20, "N": 6, "d": 5},
        ),
        sizes=lambda O_s, m_s, l_s: dict(zip(("n", "N", "d"), O_s.shape)),
        bill=(
            Bound("O_s", "loads", "n*N*d", "each element once", "an element of O_s is loaded more than once"),
            *(
                Bound(
                    x,
                    "loads",
                    "n*N",
                    "once per split and query, by one thread",
                    f"all threads load {x}: let thread t fetch that of split t into shared memory",
                )
                for x in ("m_s", "l_s")
            ),
            Bound("O", "stores", "N*d", "each element once", "O is stored more than once"),
            Bound("O", "loads", "0", "O is a result", "the sum grows in O, in HBM: let it grow in a variable"),
        ),
        share=(
            Share("HBM", "n + 3", "m and l of one split, a column of O_s and one store"),
            Share("shared memory", "2*(3*n + 2)", "twice what it takes: two stores, m twice and l once per split"),
        ),
        hints=(
            "Two stages with a barrier between them: first thread t stands for split t, then it stands for column t.",
            "First: if t < n, m_i[t] and l_i[t]. After the barrier, each thread goes through the n elements of m_i "
            "for the maximum, and once more for l and for its column of O, with the factor weight(m_i[s], m).",
            "In the second loop: w = weight(m_i[s], m); l += w * l_i[s]; acc += w * O_s[s, i, t]. Then O[i, t] = acc "
            "/ l, or 0 if l is 0. The barrier stands outside of both `if`s.",
        ),
        mistakes=(
            Mistake(
                "The splits are added as they are. Each has its own m, so bring them to a common one: times exp(m_s "
                "- m).",
                lambda *x: _merged(*x, weighted=False),
            ),
            Mistake("O is not divided by l.", lambda *x: _merged(*x, divide=False)),
            Mistake(
                "Where all splits are empty, l is 0, and 0/0 is nan: store 0 there.",
                lambda *x: _merged(*x, guard=False),
            ),
            Mistake(
                "m begins at 0, not at -∞: where all m_s are far below 0, all factors are 0.",
                lambda *x: _merged(*x, m=np.maximum(x[1].max(axis=0), 0)),
            ),
            *(
                Mistake(
                    "m begins at a finite number, not at -∞: where all m_s are lower still, all factors are 0.",
                    lambda *x, guard=guard: _merged(*x, m=np.maximum(x[1].max(axis=0), SENTINEL), guard=guard),
                )
                for guard in (True, False)
            ),
            Mistake(
                "That is the mean of the splits' own outputs: they do not weigh the same.",
                lambda O_s, m_s, l_s: (O_s / np.where(l_s == 0, 1, l_s)[:, :, None]).mean(axis=0),
            ),
            Mistake(
                "l is the sum of the l_s without their factors exp(m_s - m).",
                lambda O_s, m_s, l_s: (
                    _merged(O_s, m_s, l_s, divide=False) / np.where(l_s.sum(axis=0) == 0, 1, l_s.sum(axis=0))[:, None]
                ),
            ),
        ),
        faults={
            "RaceDetected": "a barrier is missing between the stores of m_i and l_i and the loop that reads them; or "
            "several threads store the same element.",
            "BarrierDivergence": "the barrier stands inside an `if`: all B threads must come to it.",
            "OutOfBounds": "thread t has a split only if t < n, and a column only if t < O.shape[1].",
            "UninitializedRead": "only the first n elements of m_i and l_i are filled.",
        },
    ),
)
