"""What kind of optimisation FlashAttention makes, and what kinds it does not."""

from functools import cache

import numpy as np

from ...hbm.predict import flops
from .pool import Part, lettered, question

SAME_WORK = flops("flash2", n=1024, d=64) / flops("naive", n=1024, d=64)

# (statement, whether it is true, why, what a wrong verdict reveals)
FUNCTION = (
    (
        "In exact arithmetic FlashAttention and Algorithm 0 give the same output for every input.",
        True,
        "The function is the same. Only the order of the sums differs, and so the rounding.",
        "takes FlashAttention for an approximation",
    ),
    (
        "FlashAttention approximates the softmax: it divides by the sum of one tile in place of the sum of the row.",
        False,
        "The sum of one tile is provisional. When the next tile comes, l and O are rescaled by exp(m_old − m_new), "
        "and after the last tile l is the sum of the whole row.",
        "has not understood the rescaling: back to the trace of lesson 04",
    ),
    (
        "The online softmax is exact only if the largest score of a row comes in the first tile.",
        False,
        "The rescaling corrects what came before a new maximum. Any order of the keys gives the same (m, l, O).",
        "takes the running maximum for a guess that is never mended",
    ),
    (
        "With smaller tiles FlashAttention errs more, because each tile sees fewer keys.",
        False,
        "Every row meets all keys, whatever the tile size. Only rounding differs.",
        "takes a tile for a window of attention",
    ),
    (
        "Run in float64, FlashAttention has an error many orders of magnitude smaller than in float32.",
        True,
        "What is left is rounding. An error of the method would stay.",
        "does not tell rounding from an error of the method",
    ),
    (
        "FlashAttention leaves out the tiles of S whose weights are close to 0.",
        False,
        "It visits every tile. Only tiles that a causal or a block mask hides are left out.",
        "takes it for sparse attention",
    ),
    (
        "Block-sparse FlashAttention, with a block mask that leaves tiles out, computes another function than dense "
        "attention.",
        True,
        "A key in a tile that is left out has no weight. It is exact for its own function alone.",
        "thinks that whatever FlashAttention does is exact for dense attention",
    ),
    (
        "flash2 and naive differ in the last bits of O, which shows that flash2 is an approximation.",
        False,
        "Sums taken in another order round in another way. naive differs from float64 by as much.",
        "takes naive for the truth",
    ),
    (
        "The gradients of FlashAttention are approximate, since P was not kept.",
        False,
        "P is computed again from Q, K and L, each element by the same formula: the same up to rounding.",
        "takes recomputation for estimation",
    ),
)
WORK = (
    (
        "FlashAttention is faster because its forward pass performs far fewer floating-point operations.",
        False,
        "The two products are done in full. It moves fewer elements; the operations are about the same.",
        "takes operations for time",
    ),
    (
        "A training step with FlashAttention performs more floating-point operations than one that keeps P.",
        True,
        "Scores are computed again in the backward pass: 7 products in place of 6 (flash), or 9 (our flash2).",
        "thinks that recomputation is free, or does not know of it",
    ),
    (
        "FlashAttention needs O(Nd) operations where standard attention needs O(N²d).",
        False,
        "It computes all N² scores, each with d products: O(N²d), as Theorem 1 says.",
        "takes the memory that is kept for the work",
    ),
    (
        "FlashAttention moves fewer bytes because it stores Q, K and V with fewer bits.",
        False,
        "The kernels compute in the type of their input. The elements are as large, and fewer of them move.",
        "takes precision for the reason",
    ),
    (
        "Where a step waits for memory, units that compute twice as fast make it twice as fast.",
        False,
        "A step that waits for memory does not get faster with the units. Fewer bytes help, or faster memory.",
        "has not understood the roofline: back to lesson 01",
    ),
    (
        "Tiling raises the number of operations per byte of HBM traffic.",
        True,
        "An element that is loaded once into shared memory is used by many threads.",
        "does not see that reuse is what a tile is for",
    ),
    (
        "To compute S again in the backward pass can save memory, but never time.",
        False,
        "2d operations for a score can take less time than its loads and stores. In the paper's Figure 2 the step "
        "with more operations takes 7.3 ms in place of 41.7.",
        "takes operations for time",
    ),
    (
        "In the forward pass, at N = 1,024 and d = 64, flash2 performs the same number of floating-point operations "
        "as naive to within 2 %.",
        abs(SAME_WORK - 1) < 0.02,
        f"flash2 performs {SAME_WORK:.3f} times the operations: the two products are the same, and little else counts.",
        "expects that fewer bytes must come from less work",
    ),
)
MEMORY = (
    (
        "The forward pass of FlashAttention never writes S or P to HBM.",
        True,
        "A tile of S lives and dies on chip. That is what is saved.",
        "has missed the point of fusing the three steps",
    ),
    (
        "FlashAttention keeps K and V in the memory of the CPU while the GPU works on other tiles.",
        False,
        "All is on the GPU: tensors in HBM, tiles in shared memory and registers.",
        "takes HBM for the memory of the CPU",
    ),
    (
        "Shared memory is a cache: the hardware keeps there what a kernel reads often.",
        False,
        "The kernel itself copies into shared memory and says when the copy is complete. Caches work unasked, and "
        "are not in the bill.",
        "does not know who fills a tile: back to lesson 00, part 7",
    ),
    (
        "What FlashAttention keeps for the backward pass, beside Q, K, V and O, grows like N and not like N².",
        True,
        "It keeps l and m, or L: one or two numbers per row. Standard attention keeps P.",
        "takes traffic for memory",
    ),
    (
        "FlashAttention reads each element of Q, K and V from HBM exactly once, at any N.",
        False,
        "flash reads Q once per tile of keys; flash2 reads K and V once per tile of queries.",
        "takes the ideal for the algorithm",
    ),
    (
        "The HBM traffic of FlashAttention grows linearly in N.",
        False,
        "It grows like N²d²/M: still with N², divided by what fits on chip. Linear is the memory that it keeps.",
        "takes memory for traffic",
    ),
    (
        "For long sequences, twice the memory on chip about halves what Algorithm 1 moves.",
        True,
        "Tiles of keys become twice as long, so Q and O pass half as often: N²d²/M, for M up to about Nd.",
        "does not see that M sets the length of a tile",
    ),
    (
        "Algorithm 1 moves fewer elements than Algorithm 0 for every d and every M.",
        False,
        "N²d²/M against N²: where d² is large against M, Algorithm 1 loses.",
        "has not met the case where it loses: lesson 06, part 7",
    ),
    (
        "For one query, splitting the keys among blocks (Flash-Decoding) reads fewer keys from HBM.",
        False,
        "Each key is read once with and without splits. What is gained is that more multiprocessors have work.",
        "takes parallel work for less traffic",
    ),
    (
        "The backward pass of FlashAttention computes S and P again, tile by tile, from Q, K and what was kept per "
        "row.",
        True,
        "P_ij = exp(S_ij − L_i), or exp(S_ij − m_i)/l_i: one number per row, or two, fix the softmax.",
        "thinks that gradients need a stored P",
    ),
)


def statements(pool):
    def make(rng):
        drawn = [rng.choice([s for s in pool if s[1]]), rng.choice([s for s in pool if not s[1]])]
        drawn += rng.sample([s for s in pool if s not in drawn], 2)
        rng.shuffle(drawn)
        verdicts = " ".join(f"({letter}) {why}" for letter, (_, _, why, _) in zip("abcd", drawn, strict=True))
        return {
            "text": "True or false? Give for each a reason of one sentence.",
            "parts": tuple(Part(text, "true" if truth else "false") for text, truth, *_ in drawn),
            "open": ((4, "one for each reason that names the mechanism, and does not repeat the statement"),),
            "why": verdicts,
            "wrong": (
                *((f"({letter})", reveals) for letter, (*_, reveals) in zip("abcd", drawn, strict=True)),
                ("a right verdict without a reason", "perhaps a guess: half of the points"),
            ),
            "facts": {"statements": [text for text, *_ in drawn]},
        }

    return make


question("kind", "06, parts 3 and 4", 6, "the_function")(statements(FUNCTION))
question("kind", "06, part 5", 6, "the_work")(statements(WORK))
question("kind", "06, parts 6 and 7", 6, "the_memory")(statements(MEMORY))

RIGHT_SENTENCES = (
    "It computes exact attention in tiles that stay on chip, and in the backward pass computes scores again in place "
    "of reading them: fewer reads and writes of HBM.",
    "It is the same function and about the same or more arithmetic, reordered so that N × N matrices never travel to "
    "HBM and back.",
)
WRONG_SENTENCES = {
    "It leaves out scores that hardly matter, and so does less work.": "took it for sparse attention",
    "It replaces the N × N matrix P by two factors of low rank.": "took it for a low-rank approximation",
    "It computes the same products with fewer operations, by an identity of the softmax.": (
        "took the online softmax for a saving of FLOPs; it saves next to none"
    ),
    "It computes in half precision, and so moves half of the bytes.": "took precision for the reason; the dtype is "
    "free",
    "It moves S to the memory of the CPU, where there is room for N × N numbers.": "took it for offloading",
    "It keeps S in a cache, so that the reads of S are answered quickly.": (
        "took shared memory for a cache; S is not read at all"
    ),
}


@question("kind", "06, part 2", 4)
def best_sentence(rng):
    chosen = rng.sample(sorted(WRONG_SENTENCES), 4)
    choices, letter = lettered(rng, rng.choice(RIGHT_SENTENCES), chosen)
    return {
        "text": "Which sentence says what FlashAttention does? For two of the others, say what is wrong with them.",
        "choices": choices,
        "parts": (Part("the letter", letter, 2),),
        "open": ((2, "one for each of two other sentences, refuted by a fact"),),
        "why": "Exact; tiles on chip; recomputation; fewer HBM accesses. Not fewer operations, not fewer bits, "
        "nothing left out, nothing on the CPU.",
        "wrong": tuple((name, WRONG_SENTENCES[text]) for name, text in choices if text in WRONG_SENTENCES),
    }


# claim: (the experiment that decides, what it shows, what it would show if the claim were true)
EXPERIMENTS = {
    "FlashAttention approximates the softmax": (
        "Run it in float32 and in float64, and compare both with a reference in float64.",
        "The error shrinks with the digits: below 10⁻¹² of the largest output in float64.",
        "An error in float64 about as large as in float32, since more digits do not mend a method.",
    ),
    "FlashAttention is fast because it performs fewer operations": (
        "Count the floating-point operations of both, forward and backward.",
        "About as many forward, and more in a training step: 7 products for 6.",
        "Clearly fewer operations than in standard attention, by about the factor by which it is faster.",
    ),
    "FlashAttention saves bytes because its tensors have smaller elements": (
        "Look at the size of an element of each tensor in its bill, beside the number of elements moved.",
        "Elements of 4 bytes in float32, as in naive; it is their number that falls.",
        "Elements of 1 or 2 bytes where the input has 4, and about as many of them moved as in naive.",
    ),
    "FlashAttention holds parts of S in the memory of the CPU": (
        "List the launches between input and output, and the tensors that each of them touches.",
        "All tensors are on the GPU, and S is none of them. flash2 has one launch, with Q, K, V, O and L; flash has "
        "two, the first for line 2 of Algorithm 1, with l and m in place of L.",
        "Parts of S among the tensors, and between launches copies of them to the CPU and back.",
    ),
}
NO_EXPERIMENT = "Time both on a GPU, and compare the times."


@question("kind", "06, part 2", 4)
def experiment(rng):
    claim = rng.choice(sorted(EXPERIMENTS))
    right, shows, if_true = EXPERIMENTS[claim]
    others = [what for what, *_ in EXPERIMENTS.values() if what != right]
    choices, letter = lettered(rng, right, [*others, NO_EXPERIMENT])
    return {
        "text": f'A colleague says: "{claim}." Which experiment could refute this claim? What does it show, and what '
        "would it show if the claim were true?",
        "choices": choices,
        "parts": (Part("the letter", letter, 2),),
        "open": (
            (1, f"what it shows: {shows}"),
            (1, f"what it would show if the claim were true: {if_true}"),
        ),
        "why": f"A claim is tested by what would come out otherwise if it were false. {shows} If the claim "
        f"were true: {if_true[0].lower()}{if_true[1:]}",
        "wrong": tuple(
            (name, "a time does not say where it comes from" if text == NO_EXPERIMENT else "tests another claim")
            for name, text in choices
            if text != right
        ),
        "facts": {"claim": claim},
    }


METHODS = {
    "FlashAttention (Algorithm 1)": "yes",
    "FlashAttention-2: the loops exchanged": "yes",
    "to keep K and V of earlier words when decoding, in place of computing them again": "yes",
    "Flash-Decoding: the keys of a query split among blocks, and the parts merged": "yes",
    "to compute P again in the backward pass, in place of keeping it": "yes",
    "to stop at the last key that a causal query sees, in place of computing hidden scores": "yes",
    "a window: each query sees the 128 keys nearest to it": "no",
    "P replaced by a product of N × r and r × N numbers, r small": "no",
    "a block mask that leaves out three tiles of four": "no",
    "to drop the scores below a threshold before the softmax": "no",
    "the largest score so far used as m, and earlier terms not rescaled": "no",
}


@question("kind", "06, part 4; 10, part 3", 5)
def same_function(rng):
    drawn = [rng.choice([m for m in METHODS if METHODS[m] == verdict]) for verdict in ("yes", "no")]
    drawn += rng.sample([m for m in sorted(METHODS) if m not in drawn], 4)
    rng.shuffle(drawn)
    return {
        "text": "Does the method give the same output as the one it replaces, up to rounding, on every input (yes or "
        "no)? Pick one that does not, and say in one sentence what it leaves out or gets wrong.",
        "parts": tuple(Part(method, METHODS[method]) for method in drawn),
        "open": ((2, "one sentence that names the scores or terms that are missing"),),
        "why": "Reordering, splitting, recomputing and keeping leave the function as it is. To leave out scores, to "
        "replace P and not to rescale change it; more digits cannot bring it back.",
        "wrong": (
            ("no, for a split or a recomputation", "takes rounding for an error of the method"),
            ("yes, for a block mask", "takes a fast kernel for the same function"),
        ),
        "facts": {"methods": drawn},
    }


@cache
def approximations(seed):
    """Largest error over largest |O| of five methods in float32 and float64, N = 64, d = 16 -> {method: (…, …)}."""
    q, k, v = np.random.default_rng(seed).standard_normal((3, 64, 16))
    q *= 2

    def whole(q, k, v, seen=None):
        S = q @ k.T / np.sqrt(q.dtype.type(16))
        S = S if seen is None else np.where(seen, S, -np.inf)
        P = np.exp(S - S.max(axis=1, keepdims=True))
        return P / P.sum(axis=1, keepdims=True)

    def in_tiles(q, k, v, size):
        m, l, O = np.full(64, -np.inf, q.dtype), np.zeros(64, q.dtype), np.zeros_like(v)
        for j in range(0, 64, size):
            S = q @ k[j : j + size].T / np.sqrt(q.dtype.type(16))
            m_new = np.maximum(m, S.max(axis=1))
            P, old = np.exp(S - m_new[:, None]), np.exp(m - m_new)
            m, l, O = m_new, l * old + P.sum(axis=1), O * old[:, None] + P @ v[j : j + size]
        return O / l[:, None]

    def low_rank(q, k, v):
        A, sizes, B = np.linalg.svd(whole(q, k, v))
        return (A[:, :8] * sizes[:8]) @ (B[:8] @ v)

    def dropped(q, k, v):
        P = whole(q, k, v)
        return np.where(P < 3e-6, 0, P) @ v

    i, j = np.indices((64, 64))
    methods = {
        "tiles of 16": lambda *x: in_tiles(*x, 16),
        "tiles of 5": lambda *x: in_tiles(*x, 5),
        "window": lambda q, k, v: whole(q, k, v, abs(i - j) <= 8) @ v,
        "rank 8": low_rank,
        "weights below 3·10⁻⁶ dropped": dropped,
    }
    truth = whole(q, k, v) @ v
    narrow = [x.astype(np.float32) for x in (q, k, v)]
    return {
        name: tuple(float(np.abs(run(*x) - truth).max() / np.abs(truth).max()) for x in (narrow, (q, k, v)))
        for name, run in methods.items()
    }


@question("kind", "06, parts 3 and 4", 5)
def read_errors(rng):
    seed = rng.randrange(10)
    errors = approximations(seed)
    names = sorted(errors)
    rng.shuffle(names)

    def shown(error):
        return "below 10⁻¹²" if error < 1e-12 else "10⁻⁷ to 10⁻⁵" if 1e-7 < error < 1e-5 else "0.1 or more"

    rows = "\n".join(
        f"    {label:<7}  {shown(errors[name][0]):<13}  {shown(errors[name][1])}"
        for label, name in zip("abcde", names, strict=True)
    )
    return {
        "text": "Five programs for the same attention layer, each compiled for float32 and for float64. Their largest "
        f"error against a reference in float64, over max|O|:\n\n    program  float32        float64\n{rows}\n\n"
        "For each: does it compute the same function as the reference (yes or no)? Which column tells, and why not the "
        "other?",
        "parts": tuple(
            Part(f"program {label}", "no" if errors[n][1] > 1e-12 else "yes")
            for label, n in zip("abcde", names, strict=True)
        ),
        "open": (
            (1, "the float64 column: an error of rounding shrinks with the digits, one of the method does not"),
            (
                1,
                "three programs look alike in float32, one slightly wrong: only more digits tell that from rounding",
            ),
        ),
        "why": f"{', '.join(f'({label}) {name}' for label, name in zip('abcde', names, strict=True))}. In tiles with "
        "an online softmax the function is the same. A window, a low rank and dropped weights change it, the last so "
        "little that it looks like rounding, until there are more digits.",
        "wrong": (
            ("no, for 10⁻⁷ to 10⁻⁵ in float32 alone", "takes rounding of seven digits for an approximation"),
            ("yes, for 10⁻⁷ to 10⁻⁵ in float64", "takes a small error for rounding, which float64 makes far smaller"),
        ),
        "facts": {"seed": seed, "names": names},
    }
