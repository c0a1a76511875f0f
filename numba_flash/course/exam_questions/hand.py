"""Small cases to work out by hand, in fractions."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np

from ...merge import merge
from .pool import Part, number, power, question


@question("hand", "04, part 3", 8)
def trace(rng):
    exponents = [
        rng.choice(((0, 1), (1, 0), (0, 0))),
        rng.choice(((3, 1), (2, 2), (3, 2))),
        rng.choice(((1, 3), (0, 2), (4, 3))),
    ]
    values = [(rng.randrange(1, 9), rng.randrange(1, 9)) for _ in exponents]
    m, l, lO, rows = None, Fraction(0), Fraction(0), []
    for scores, V in zip(exponents, values, strict=True):
        m_new = max(scores) if m is None else max(m, *scores)
        old = Fraction(0) if m is None else Fraction(2) ** (m - m_new)
        weights = [Fraction(2) ** (s - m_new) for s in scores]
        m, l = m_new, l * old + sum(weights)
        lO = lO * old + sum(w * v for w, v in zip(weights, V, strict=True))
        rows.append((m, l, lO / l))
    table = "\n".join(
        f"    tile {n}   S = {power(s[0])}, {power(s[1])}".ljust(38) + f"V = {v[0]}, {v[1]}"
        for n, (s, v) in enumerate(zip(exponents, values, strict=True), 1)
    )
    return {
        "text": "One row of scores comes in three tiles of two keys, d = 1. The exponentials are powers of two, so "
        f"that fractions stay exact (exp(ln 2) = 2):\n\n{table}\n\nTrace the online softmax, with m the largest score "
        "so far, l the sum of exp(S − m) and O the output if no more keys came.",
        "parts": (
            *(Part(f"l after tile {n}", number(l)) for n, (_, l, _) in enumerate(rows, 1)),
            *(Part(f"O after tile {n}", number(O)) for n, (_, _, O) in enumerate(rows, 1)),
        ),
        "open": ((2, "the trace shows m and the factor exp(m_old − m_new) of each tile"),),
        "also": "Write m and the factor exp(m_old − m_new) beside each tile.",
        "why": "; ".join(
            f"tile {n}: m = {power(m)}, l = {l}, l·O = {l * O}, O = {O}" for n, (m, l, O) in enumerate(rows, 1)
        )
        + ". The factors are 0, "
        + ", ".join(f"{Fraction(2) ** (a[0] - b[0])}" for a, b in pairwise(rows))
        + ".",
        "wrong": (
            ("l grows without a factor", "earlier terms were taken with another m; they must be rescaled"),
            ("O right after tile 1 alone", "rescaled l but not l·O, or the other way round"),
        ),
        "facts": {"exponents": exponents, "values": values},
    }


@question("hand", "04, part 5; 11, part 3", 5)
def merging(rng):
    sums = rng.choice([(a, b) for a in range(1, 10) for b in range(1, 10) if max(a, b) >= 2 * min(a, b)])
    outs = rng.sample(range(12, 24, 2), 2)  # so close that a third of their sum is below both
    parts = [(np.array([[float(O)]]), np.array([math.log(s)])) for O, s in zip(outs, sums, strict=True)]
    out, lse = merge(*parts[0], *parts[1])
    return {
        "text": "The keys of a query are in three parts. Each part alone gave an output O and L = log of the sum of "
        f"exp(S):\n\n    part 1   O = {outs[0]}   L = log {sums[0]}\n    part 2   O = {outs[1]}   L = log {sums[1]}\n  "
        "  part 3   no keys: O = 0, L = −∞\n\nMerge them.",
        "parts": (
            Part("exp(L) of all keys", round(math.exp(lse[0]))),
            Part("O of all keys", number(Fraction(float(out[0, 0])).limit_denominator(100)), 2),
            Part("exp(L₃ − L), the weight of part 3", 0),
        ),
        "why": f"Sums add: exp(L) = {sums[0]} + {sums[1]} + 0. O = ({sums[0]}·{outs[0]} + {sums[1]}·{outs[1]})/"
        f"{sum(sums)}. An empty part has the weight exp(−∞) = 0, and any order gives the same.",
        "wrong": (
            (f"O = {sum(outs) / 2:g}", "the mean of the two: the parts weigh by their sums exp(L)"),
            (f"O = {sum(outs) / 3:.3g}", "counted the empty part as a third"),
        ),
        "facts": {"sums": sums, "outs": outs},
    }


@question("hand", "07, part 2", 5)
def softmax_gradient(rng):
    P = rng.choice(((2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 2, 2), (5, 1, 2)))
    P = [Fraction(p, sum(P)) for p in P]
    dP, D = [], 0
    while D == 0 or len(set(dP)) == 1:
        dP = [8 * rng.randrange(-3, 4) for _ in P]
        D = sum(p * g for p, g in zip(P, dP, strict=True))
    dS = [p * (g - D) for p, g in zip(P, dP, strict=True)]
    return {
        "text": f"One row of the backward pass: P = {', '.join(map(str, P))} and dP = {', '.join(map(str, dP))}. "
        "Compute D and the row of dS.",
        "parts": (Part("D", number(D)), *(Part(f"dS{sub}", number(x)) for sub, x in zip("₁₂₃", dS, strict=True))),
        "open": ((1, "a check: the sum of a row of dS is 0, since adding a constant to S does not change P"),),
        "also": "Name a check of the row of dS that needs no second computation.",
        "why": f"D = ∑P·dP = {D}. dS = P·(dP − D) = {', '.join(map(str, dS))}. Their sum is 0.",
        "wrong": (
            (
                f"dS = {', '.join(str(number(p * g)) for p, g in zip(P, dP, strict=True))}",
                "forgot D: each weight depends on all scores",
            ),
        ),
        "facts": {"P": [str(p) for p in P], "dP": dP},
    }


@question("hand", "08, parts 2 and 3", 4)
def causal_rows(rng):
    N, N_k = rng.choice(((3, 7), (4, 6), (6, 4), (7, 3), (5, 2), (2, 6)))
    i, sign = rng.randrange(N), "+" if N_k > N else "−"
    seen = [max(0, min(N_k, row + N_k - N + 1)) for row in range(N)]
    return {
        "text": f"Causal order with N = {N} queries and N_k = {N_k} keys, the last query aligned with the last key. "
        "Queries and keys are numbered from 0.",
        "parts": (
            Part(f"How many keys does query {i} see?", seen[i]),
            Part("How many pairs of a query and a key are allowed?", sum(seen)),
            Part("How many queries see no key at all?", seen.count(0)),
        ),
        "open": ((1, "what a query that sees no key gets: O = 0, L = −∞, gradients 0"),),
        "also": "What are O and L of a query that sees no key?",
        "why": f"Query i sees key j where j ≤ i + N_k − N = i {sign} {abs(N_k - N)}. Keys seen per query: "
        f"{', '.join(map(str, seen))}.",
        "wrong": (
            (f"{min(N_k, i + 1)} keys for query {i}", "aligned at the top left, as PyTorch's is_causal does")
            if min(N_k, i + 1) != seen[i]
            else (f"{seen[i] - 1} keys for query {i}", "a query sees the key that is aligned with it, too"),
        ),
        "facts": {"n": N, "n_k": N_k, "i": i},
    }


@question("hand", "04, last part; 05, part 2", 5)
def line_12(rng):
    l, rise = rng.choice((4, 6, 8)), rng.choice((1, 2))
    l_tile = rng.choice([tile for tile in (1, 2, 3) if l != Fraction(l, 2**rise) + tile])  # else the factor is `old`
    O, O_tile = 8 * rng.randrange(1, 5), 8 * rng.randrange(5, 9)
    old = Fraction(1, 2**rise)
    l_new = old * l + l_tile
    factor = old * l / l_new
    result = factor * O + l_tile / l_new * O_tile
    below = l_new if l_new.denominator == 1 else f"({l_new})"
    shown = f"{old * l}/{below}"
    shown += f" = {factor}" if shown != str(factor) else ""
    return {
        "text": f"Line 12 of Algorithm 1, d = 1. So far m_i = 0, l_i = {l} and O_i = {O}, already divided by l_i. A "
        f"tile comes with m_tile = {power(rise)} and l_tile = {l_tile}; alone it would give the output {O_tile}, that "
        f"is P_ij·V_j = {l_tile * O_tile}.",
        "parts": (
            Part("l_new", number(l_new)),
            Part("the factor of the old O_i", number(factor)),
            Part("the new O_i", number(result), 2),
        ),
        "why": f"m_new = {power(rise)}, exp(m_i − m_new) = {old}, l_new = {old}·{l} + {l_tile} = {l_new}. "
        f"The old O_i is multiplied by {shown}; "
        f"O_i = ({old}·{l}·{O} + {l_tile * O_tile})/{below} = {result}.",
        "wrong": (
            (f"the factor {old}", "that is for l·O, as in FlashAttention-2; Algorithm 1 stores O divided by l"),
            (f"l_new = {l + l_tile}", "the old sum was not rescaled"),
        ),
        "facts": {"l": l, "l_tile": l_tile, "rise": rise, "O": O, "O_tile": O_tile},
    }
