"""Derivations, read by a person, each with a value to check."""

from fractions import Fraction

from ...blocks import tiles
from ...hbm.predict import predict
from .pool import Part, number, power, question


@question("derive", "07, part 2", 7)
def two_forms_of_D(rng):
    P = [Fraction(1, 4), Fraction(3, 4)] if rng.random() < 0.5 else [Fraction(1, 2), Fraction(1, 2)]
    V = [[rng.randrange(-4, 5) for _ in range(2)] for _ in P]
    dO = [4 * rng.randrange(1, 4), 4 * rng.randrange(-3, 0)]
    O = [sum(p * row[t] for p, row in zip(P, V, strict=True)) for t in range(2)]
    D = sum(a * b for a, b in zip(dO, O, strict=True))
    return {
        "text": "Show that D_i = ∑_j P_ij·dP_ij is the same as D_i = ∑_t dO_it·O_it, and say in one sentence why "
        f"FlashAttention needs the second form. Then evaluate it for one row with P = {P[0]}, {P[1]}; V has the rows "
        f"({V[0][0]}, {V[0][1]}) and ({V[1][0]}, {V[1][1]}); dO = ({dO[0]}, {dO[1]}).",
        "parts": (Part("D", number(D)),),
        "open": (
            (1, "dP_ij = ∑_t dO_it·V_jt put in"),
            (2, "the sums exchanged, and ∑_j P_ij·V_jt = O_it recognised"),
            (1, "why: it takes row i of dO and of O alone, and no row of P, which is never whole on chip"),
        ),
        "why": f"D_i = ∑_j P_ij ∑_t dO_it V_jt = ∑_t dO_it ∑_j P_ij V_jt = ∑_t dO_it O_it. Here O = ({O[0]}, {O[1]}) "
        f"and D = {D}. The second form needs no row of P, so that tiles can be taken one by one.",
        "wrong": (("D = ∑dO·V", "left the weights out"), ("a proof by one example", "no points for the derivation")),
        "facts": {"P": [str(p) for p in P], "V": V, "dO": dO},
    }


@question("derive", "04, part 2", 6)
def why_the_factor(rng):
    rise = rng.choice((1, 2, 3))
    return {
        "text": "An online softmax keeps m, l = ∑exp(S_j − m) and l·O = ∑exp(S_j − m)·V_j of the keys so far. A tile "
        "comes that raises the maximum from m_old to m_new. Derive the factor by which l and l·O must be multiplied. "
        "Why are the old scores not needed? What is the factor at the first tile, where m_old = −∞, and why does that "
        f"serve? Last: by how much is l multiplied where the maximum rises by {power(rise)}?",
        "parts": (Part("the factor in the last case, as a decimal", 2.0**-rise),),
        "open": (
            (2, "exp(S − m_new) = exp(S − m_old)·exp(m_old − m_new)"),
            (1, "the factor is the same for all terms, so it comes out of the sum: the scores are not needed"),
            (1, "exp(−∞) = 0: there is nothing yet, and what stood in l and l·O is erased"),
        ),
        "why": "exp(S_j − m_new) = exp(S_j − m_old)·exp(m_old − m_new), and the last factor does not depend on j. "
        "With m_old = −∞ it is 0, so the start, l = 0 and O = 0, needs no case of its own.",
        "wrong": (
            ("exp(m_new − m_old)", "the wrong way round: l would grow when a larger score comes, and overflow"),
            ("only l is rescaled", "l·O has the same terms, times V"),
        ),
        "facts": {"rise": rise},
    }


@question("derive", "06, part 7", 8)
def theorem_2(rng):
    d, KiB = rng.choice((64, 128)), rng.choice((32, 64, 128))
    M, N = 1024 * KiB // 4, 1024 * rng.choice((4, 8, 16))
    Bc = tiles(M, 4 * d)
    Tc = tiles(N, Bc)
    return {
        "text": "M elements fit on chip, d ≤ M ≤ Nd. Derive that Algorithm 1 moves Θ(N²d²/M) elements: say how long a "
        "tile of keys can be, how often Q and O pass, and what that costs. Compare with Algorithm 0: when does "
        f"Algorithm 1 move less? Then take Bc = ⌈M/4d⌉ with M = {M:,}, d = {d} and N = {N:,}.",
        "parts": (
            Part("How many tiles of keys are there?", Tc),
            Part(
                "How many elements of Q are loaded?",
                predict("flash", n=N, d=d, blocks=(8, Bc)).kernels["flash"]["Q"].loads,
            ),
        ),
        "open": (
            (2, "Bc is of the order M/d, since K_j and V_j of Bc × d must fit"),
            (2, "Tc = N/Bc of the order Nd/M passes over Q and O, of Nd elements each: Nd·Nd/M = N²d²/M"),
            (1, "Algorithm 0 moves Θ(Nd + N²): Algorithm 1 moves less where d² is small against M"),
        ),
        "why": f"Bc = {Bc}, Tc = {Tc}, Q is loaded Tc times: Tc·Nd. K and V, read once, are Nd, which M ≤ Nd makes the "
        "smaller part. The constants do not show in Θ; the bill has them.",
        "wrong": (
            ("Θ(N²d/M)", "forgot that a row has d elements, so that Bc is M/d and not M"),
            ("linear in N", "M is fixed, so the number of passes grows with N as well"),
        ),
        "facts": {"n": N, "d": d, "M": M},
    }


@question("derive", "07, part 2", 7)
def softmax_jacobian(rng):
    weights = rng.choice(((1, 1), (1, 3), (3, 1), (1, 7), (3, 5)))
    P = [Fraction(w, sum(weights)) for w in weights]
    return {
        "text": "P_j = exp(S_j)/∑_k exp(S_k) is one row of the softmax. Derive ∂P_j/∂S_k, and from it dS_k = P_k·(dP_k "
        f"− D) with D = ∑_j P_j·dP_j. Then evaluate for P = {P[0]}, {P[1]}:",
        "parts": (Part("∂P₁/∂S₁", number(P[0] * (1 - P[0]))), Part("∂P₁/∂S₂", number(-P[0] * P[1]))),
        "open": (
            (2, "the quotient rule: P_k − P_k² for j = k, −P_j·P_k otherwise"),
            (1, "the chain rule, a sum over all j"),
            (1, "P_k taken out of the sum, and D recognised"),
        ),
        "why": "dS_k = ∑_j dP_j ∂P_j/∂S_k = dP_k·P_k − ∑_j dP_j·P_j·P_k = P_k·(dP_k − D).",
        "wrong": (("dS_k = P_k(1 − P_k)·dP_k", "took the diagonal alone: all weights of a row share their sum"),),
        "facts": {"P": [str(p) for p in P]},
    }


SPARED = 3  # accesses per score that go with P: it is stored once, and loaded twice


def loads_of(d, per_byte, size):
    """How many loads of an element of `size` bytes take as long as a score, 2d operations."""
    return 2 * d / (per_byte * size)


@question("derive", "07, part 8; 01, part 6", 6)
def does_recomputing_pay(rng):
    pays = rng.random() < 0.5
    cases = [(d, n, 4 if n <= 20 else 2) for d in (32, 64, 128, 256) for n in (5, 10, 20, 50, 100, 200)]
    d, per_byte, size = rng.choice([case for case in cases if (loads_of(*case) < SPARED) == pays])
    cost = loads_of(d, per_byte, size)
    return {
        "text": f"A GPU has time for {per_byte} operations while one byte comes from HBM. Elements have {size} bytes, "
        f"d = {d}. In the backward pass a score can be computed again by 2d operations. Derive how many loads of one "
        "element take as long. Suppose that the rest is fused in either case, so that dP and dS stay on chip. Then who "
        "keeps P stores it in the forward pass, and loads it twice in the backward pass, for dV and for dS. Does it "
        "pay to compute the score again, by this measure, and what does the measure leave out?",
        "parts": (
            Part("the loads that take as long as one score", cost, 2),
            Part("Does it pay (yes or no)?", "yes" if pays else "no"),
        ),
        "open": (
            (1, f"an element takes the time of {size} × {per_byte} operations"),
            (1, "the measure leaves out caches, the N² memory of P, or that peaks are not reached"),
        ),
        "why": f"2d = {2 * d} operations against {per_byte * size} in the time of one element: {cost:.3g} loads, "
        f"against the {SPARED} accesses of P. In any case P, N × N, need not be kept. (Algorithm 3 makes 5 accesses "
        "more, of dP and dS; fusing spares those, also where P is kept.)",
        "wrong": (
            ("more FLOPs, so slower", "where memory sets the pace, operations take no time of their own"),
            ("all accesses of Algorithm 3", "counted dP and dS too, which go by fusing and not by computing P again"),
        ),
        "facts": {"d": d, "per_byte": per_byte, "itemsize": size},
    }
