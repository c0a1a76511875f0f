"""The exercise of lesson 01: what goes out to HBM only to come back."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake, Share
from .common import cases, normal


def _row(rng, N):
    S = normal(rng, N, size=2.0, mean=90.0)
    return S, S.max(), np.exp(S - S.max(), dtype=np.float32).sum() + np.float32(1)


EXERCISES = (
    Exercise(
        name="01_fuse",
        answer="fused",
        outputs=("P",),
        inputs=cases(3, _row, *({"N": n} for n in (300, 1, 64, 65))),
        sizes=lambda S, m, l: {"N": len(S)},
        bill=(
            Bound("S", "loads", "N", "each score once", "S is loaded twice: keep S[i] in a variable, a register"),
            Bound("P", "stores", "N", "each weight once", "what is in between is stored in P, and then P again"),
            Bound("P", "loads", "0", "P is a result", "P serves for what is in between: use a variable, a register"),
        ),
        share=(Share("HBM", "2", "a load and a store"),),
        hints=(
            "Write down what `subtract` does to one element, and then what `weigh` does to the result. Where does "
            "the result of the first step live in between?",
            "A variable of the kernel is in a register, and free. So give S[i] - m a name, or no name at all.",
            "i = cuda.grid(1), the guard, and P[i] = math.exp(S[i] - m) / l.",
        ),
        mistakes=(
            Mistake("That is exp(S - m): it is not divided by l yet.", lambda S, m, l: np.exp(S - m)),
            Mistake("m is not subtracted: exp of a score above 88.7 is ∞ in float32.", lambda S, m, l: np.exp(S) / l),
            Mistake("That is S + m: subtract m, so that exp stays below 1.", lambda S, m, l: np.exp(S + m) / l),
            Mistake(
                "That is m - S: the largest score then has the smallest weight.", lambda S, m, l: np.exp(m - S) / l
            ),
            Mistake("It is multiplied by l, and not divided.", lambda S, m, l: np.exp(S - m) * l),
            Mistake("That is S - m, what `subtract` makes. The step of `weigh` is missing.", lambda S, m, l: S - m),
            Mistake("That is (S - m) / l: the exponential is missing.", lambda S, m, l: (S - m) / l),
        ),
        faults={
            "OutOfBounds": "the guard is missing: a thread whose number is N or more has no element.",
            "RaceDetected": "the thread's number must be that in the whole grid, cuda.grid(1).",
            "UninitializedRead": "P is read before anything is in it. What is in between belongs in a variable.",
        },
    ),
)
