"""One-line faults, each of a kind that other implementations were published with. The suite must find every one.

A fault replaces text of one file. That text must be there as often as `times` says, so that a fault which no longer
fits its file is an error, and no silent pass. Faults are grouped by the file they are put in; barriers are found by
reading the files.
"""

import ast
import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..stages import PORTABLE

PACKAGE = Path(__file__).parent.parent
BARRIER = "cuda.syncthreads()"
TAIL_BARRIERS = {"flash_backward without barrier 4": "ragged"}  # fault -> shown_by, where it is not "whole"


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new`: everywhere, or at the place numbered `at` alone, from 0."""

    name: str
    old: str
    new: str
    stands_for: str
    times: int = 1
    at: int | None = None
    aim: str = "exact"  # which tests go first, a key of test_mutants.TESTS; "races": strict mode finds it for certain
    tests_of: str = ""  # the stage file whose tests are run; by default that of the fault
    shown_by: str = "whole"  # the simplest that shows it, a key of score.NEEDS; "": the lab has nothing that does


@dataclass(frozen=True)
class Mutant:
    """A fault in a file of the package."""

    file: str
    fault: Fault

    @property
    def name(self):
        return f"{Path(self.file).stem}: {self.fault.name}"

    @property
    def stage(self):
        """What the tests call the stage: the file's name without the pass."""
        return re.sub("(_split|(_atomic)?_backward)$", "", self._tests_of)

    @property
    def direction(self):
        last = self._tests_of.removeprefix(self.stage)
        return {"": "forward", "_backward": "backward", "_atomic_backward": "atomic", "_split": "split"}[last]

    @property
    def _tests_of(self):
        return self.fault.tests_of or Path(self.file).stem

    def apply(self, source):
        """The source with the fault in it. ValueError when the fault does not fit the source."""
        fault = self.fault
        parts = source.split(fault.old)
        if len(parts) != fault.times + 1:
            raise ValueError(
                f"the fault {self.name!r} no longer fits numba_flash/{self.file}: {fault.old!r} is there "
                f"{len(parts) - 1} times, and should be {fault.times}. Mend it in numba_flash/course/faults.py"
            )
        if fault.at is None:
            return fault.new.join(parts)
        before, after = parts[: fault.at + 1], parts[fault.at + 1 :]
        return fault.old.join(before) + fault.new + fault.old.join(after)


def barriers(file):
    """One fault for each barrier of the file: it is dropped."""
    source = (PACKAGE / file).read_text(encoding="utf-8")
    total = source.count(BARRIER)
    kernels = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    seen = {}
    for at, line in enumerate(n for n, text in enumerate(source.splitlines(), 1) for _ in range(text.count(BARRIER))):
        kernel = max((k for k in kernels if k.lineno <= line <= k.end_lineno), key=lambda k: k.lineno).name
        seen[kernel] = seen.get(kernel, 0) + 1
        name = f"{kernel} without barrier {seen[kernel]}"
        shown_by = TAIL_BARRIERS.get(name, "whole")
        yield Fault(name, BARRIER, "pass", "a missing barrier", times=total, at=at, aim="races", shown_by=shown_by)


# fmt: off
FAULTS = {
    "stages/naive.py": [
        Fault("scores not scaled", "acc * scale if", "acc if", "scale missing"),
        Fault("softmax without its maximum", "m = max(m, S[h, i, j])", "m = real(0)",
              "exp overflows, or all of it underflows", times=2, shown_by="low"),
        Fault("m starts at 0", "m = real(-math.inf)", "m = real(0)",
              "an initial maximum above scores that are far below 0", times=2, shown_by="low"),
        Fault("a finite sentinel", "else real(-math.inf)", "else real(-1e9)",
              "−1e9 as the mask: hidden keys outweigh very negative scores", aim="masks", shown_by="early"),
        Fault("l of a row without keys", "if l == real(0):", "if l < real(0):",
              "0 / 0 in a row that sees no key", aim="masks", shown_by="early"),
        Fault("top-left causal", "i + N_k - N, j)", "i, j)",
              "causal order aligned at the top left where N_q ≠ N_k", aim="masks", shown_by="causal"),
        Fault("another batch's key mask", "b = h * mask.shape[0] // Q.shape[0]", "b = h % mask.shape[0]",
              "head and batch taken apart in the wrong order", aim="masks", shown_by="keys"),
        Fault("K heads interleaved", "g = h * K.shape[0] // Q.shape[0]", "g = h % K.shape[0]",
              "GQA by repeat in place of repeat_interleave", shown_by="heads"),
        Fault("L without m", "m + math.log(l)", "math.log(l)", "lse off by the row's maximum"),
    ],
    "stages/naive_backward.py": [
        Fault("D from dP alone", "D_i += P[h, i, j] * dP[h, i, j]", "D_i += dP[h, i, j]", "D from the wrong tensor"),
        Fault("D left out", "(dP[h, i, j] - D_i)", "dP[h, i, j]", "the softmax's Jacobian without its second term"),
        Fault("one head of a group in dV", "for h in range(g * group, (g + 1) * group):", "for h in range(g, g + 1):",
              "GQA not summed, and from the wrong head", times=2, at=0, shown_by="heads"),
        Fault("one head of a group in dK", "for h in range(g * group, (g + 1) * group):",
              "for h in range(g * group, g * group + 1):", "GQA not summed", times=2, at=1, shown_by="heads"),
        Fault("dV without dO", "acc += P[h, i, j] * dO[h, i, t]", "acc += P[h, i, j]",
              "dO left out, unseen where a test has dO = ones"),
        Fault("dK not scaled", "dK[g, j, t] = acc * scale", "dK[g, j, t] = acc", "scale missing in one gradient"),
        Fault("P from lse with the wrong sign", "weight(S[h, i, j], L[h, i])", "weight(S[h, i, j], -L[h, i])",
              "the sign of lse; a pass that keeps P does not see it"),
        Fault("what dropout keeps not scaled", "real(1 / (1 - p_drop)) if Z[h, i, j]", "real(1) if Z[h, i, j]",
              "1 / (1 − p) in one pass alone", aim="masks", shown_by="dropout"),
    ],
    "stages/tiled.py": [
        Fault("K not through its tile", "acc += Q_i[ty, t] * K_j[tx, t]",
              "acc += Q_i[ty, t] * load_or_zero(K, g, col, t0 + t)",
              "right, with the traffic that the stage says it deletes", aim="bill", shown_by="bill"),
        Fault("a tail of d dropped", "range(0, Q.shape[2], T)", "range(0, Q.shape[2] // T * T, T)",
              "a dropped tail: d / T rounded down", shown_by="ragged"),
        Fault("a tail of keys dropped", "range(0, P.shape[2], T)", "range(0, P.shape[2] // T * T, T)",
              "a dropped tail: N_k / T rounded down", shown_by="ragged"),
        Fault("a tail of queries dropped", "(tiles(d, T), tiles(N, T), H)", "(tiles(d, T), max(1, N // T), H)",
              "a grid rounded down", shown_by="ragged"),
        Fault("no bounds on rows", "if i < X.shape[1] and t < X.shape[2]:", "if t < X.shape[2]:",
              "a read beyond the last row, which a GPU answers", shown_by="ragged"),
        Fault("tile of K by the wrong row", "* K_j[tx, t]", "* K_j[ty, t]", "an index of a tile transposed"),
        Fault("scaled twice", "acc * scale if", "acc * scale * scale if",
              "scale multiplied twice, unseen where a test has scale = 1"),
        Fault("top-left causal", "row + N_k - N, col)", "row, col)",
              "causal order aligned at the top left where N_q ≠ N_k", aim="masks", shown_by="causal"),
    ],
    "stages/tiled_backward.py": [
        Fault("a tail of queries dropped in dV", "range(0, P.shape[1], T)", "range(0, P.shape[1] // T * T, T)",
              "a dropped tail: N / T rounded down", shown_by="ragged"),
        Fault("a tail of d dropped in dP", "range(0, V.shape[2], T)", "range(0, V.shape[2] // T * T, T)",
              "a dropped tail: d / T rounded down", shown_by="ragged"),
        Fault("dK without the transpose", "dS_ij[i, ty] * Q_i[i, tx]", "dS_ij[ty, i] * Q_i[i, tx]",
              "dS in place of its transpose"),
        Fault("V heads interleaved", "g = h * V.shape[0] // dO.shape[0]", "g = h % V.shape[0]",
              "GQA by repeat in place of repeat_interleave", shown_by="heads"),
        Fault("dQ scaled twice", "acc * scale                    # Alg. 3, l. 4",
              "acc * scale * scale            # Alg. 3, l. 4", "scale twice"),
        Fault("dP without dropout", "    drop(dP, Z, mask, device=device)", "    pass",
              "dropout that the backward pass forgot", aim="masks", shown_by="dropout"),
    ],
    "stages/online_softmax.py": [
        Fault("l not rescaled", "l_i = l_i * weight(m_i, m_new) +", "l_i = l_i +", "l not rescaled when m grows"),
        Fault("m starts at 0", "m_i = real(-math.inf)", "m_i = real(0)",
              "an initial maximum above scores that are far below 0", shown_by="low"),
        Fault("tile not cleared at its tail", "P_ij[ty, tx] = real(0)", "pass",
              "stale shared memory: keys of the last tile that do not exist", shown_by="short"),
        Fault("not divided by l", "m_i) / l_i", "m_i)", "the last division forgotten"),
        Fault("l of a row without keys", "if l_i == real(0):", "if l_i < real(0):",
              "0 / 0 in a row that sees no key", aim="masks", shown_by="early"),
        Fault("dropout by the row of a tile", "p_drop, h, row, j0 + tx)", "p_drop, h, ty, j0 + tx)",
              "a random mask that depends on the tiles", aim="masks", shown_by="dropout"),
    ],
    "stages/online_softmax_backward.py": [
        Fault("P not divided by l", "p / l_i if", "p if", "the last division forgotten", shown_by="alone"),
        Fault("a row without keys", "if l_i != real(0) else real(0)", "if l_i >= real(0) else real(0)",
              "0 / 0 in a row that sees no key", aim="masks", shown_by="alone"),
    ],
    "stages/flash.py": [
        Fault("m starts at 0", "m[h, i] = real(-math.inf)", "m[h, i] = real(0)",
              "an initial maximum above scores that are far below 0", shown_by="low"),
        Fault("a tile's maximum starts at 1e-30", "m_tile = real(-math.inf)", "m_tile = real(1e-30)",
              "the smallest positive float taken for the lowest (FLT_MIN)", shown_by="low"),
        Fault("a finite sentinel", "else real(-math.inf)", "else real(-1e9)",
              "−1e9 as the mask: hidden keys outweigh very negative scores", aim="masks", shown_by="keys"),
        Fault("O not rescaled", "O_i[t] *= l_old", "pass", "O not rescaled when m grows"),
        Fault("l not rescaled", "l_old = weight(m_i, m_new) * l_i", "l_old = l_i", "l not rescaled when m grows"),
        Fault("the tile's sum not rescaled", "l_i = l_old + new * l_tile", "l_i = l_old + l_tile",
              "what a tile gives not brought to the common maximum"),
        Fault("a tile of hidden keys", "if l_tile != real(0):", "if l_tile >= real(0):",
              "0 / 0 where the first tile is all hidden", aim="masks", shown_by="keys"),
        Fault("m not kept", "m[h, i] = m_i", "pass", "a statistic lost between two tiles"),
        Fault("a tail of keys dropped", "for j in range(0, N_k, Bc):", "for j in range(0, N_k // Bc * Bc, Bc):",
              "a dropped tail: N_k / Bc rounded down", shown_by="ragged"),
        Fault("keys beyond the tail", "for c in range(min(Bc, N_k - j)):", "for c in range(Bc):",
              "tail columns: rows of K_j that were not loaded", times=3, at=0, aim="races", shown_by="keys"),
        Fault("weights beyond the tail", "for c in range(min(Bc, N_k - j)):", "for c in range(Bc):",
              "tail columns: stale scores enter the sum", times=3, at=1, shown_by="ragged"),
        Fault("one query too few", "first(j + N - N_k)", "first(j + N - N_k + 1)",
              "causal: the diagonal skipped with its tile", aim="masks", shown_by="causal"),
        Fault("one dropout for all heads", "keep(seed, p_drop, h, i, j + c)", "keep(seed, p_drop, 0, i, j + c)",
              "random numbers used twice", aim="masks", shown_by="dropout"),
    ],
    "stages/flash_backward.py": [
        Fault("D without dO", "dO_i[r, t] * O[h, i + r, t]", "O[h, i + r, t]",
              "dO left out of D, unseen where a test has dO = ones"),
        Fault("dQ overwritten", "dQ[h, i + r, t] += acc * scale", "dQ[h, i + r, t] = acc * scale",
              "a gradient of the last tile alone"),
        Fault("dQ not cleared", "launch(make_initialise_dQ(real), rows, ROWS, dQ, device=device)", "pass",
              "a sum that starts from what the memory held"),
        Fault("P not divided by l", "weight(s, m_i[r]) / l_i[r]", "weight(s, m_i[r])",
              "the last division forgotten", shown_by="alone"),
        Fault("a row without keys", "if l_i[r] == real(0):", "if l_i[r] < real(0):",
              "0 / 0 in a row that sees no key", aim="masks", shown_by="alone"),
        Fault("one head of a group", "range(g * group, (g + 1) * group)", "range(g * group, g * group + 1)",
              "GQA not summed", shown_by="heads"),
        Fault("l from lse", "l[h, i] = real(1)", "l[h, i] = math.exp(L[h, i])", "divided by l twice"),
        Fault("keys beyond the tail", "for k in range(min(Bc, N_k - j)):", "for k in range(Bc):",
              "tail columns: NaN in dQ", shown_by="ragged"),
        Fault("dV without dropout", "p *= z", "pass", "dropout that one gradient forgot", aim="masks",
              shown_by="dropout"),
    ],
    "stages/flash2.py": [
        Fault("m starts at 0", "m_i = real(-math.inf)", "m_i = real(0)",
              "an initial maximum above scores that are far below 0", shown_by="low"),
        Fault("m starts at 1e-30", "m_i = real(-math.inf)", "m_i = real(1e-30)",
              "the smallest positive float taken for the lowest (FLT_MIN)", shown_by="low"),
        Fault("m starts at −1e30", "m_i = real(-math.inf)", "m_i = real(-1e30)",
              "a finite initial maximum above scores below it", shown_by="lowest"),
        Fault("a finite sentinel", "else real(-math.inf)", "else real(-1e4)",
              "−1e4 as the mask: hidden keys outweigh very negative scores", aim="masks", shown_by="early"),
        Fault("O not rescaled", "O_i[t] *= old", "pass", "O not rescaled when m grows"),
        Fault("l not rescaled", "l_i *= old", "pass", "l not rescaled when m grows"),
        Fault("O divided by the factor", "O_i[t] *= old", "O_i[t] /= old if old != real(0) else real(1)",
              "the inverse that FlashAttention-2 misprints, line 10"),
        Fault("scale missing", "s = s * scale if", "s = s if", "scale left out, unseen where a test has scale = 1"),
        Fault("scale twice", "s = s * scale if", "s = s * scale * scale if", "Q scaled before, and S again"),
        Fault("scale of 1/√d whatever was asked", "s = s * scale if", "s = s / math.sqrt(real(d)) if",
              "an argument that is ignored", shown_by="scale"),
        Fault("not divided by l", "O_i[t] / l_i if", "O_i[t] if", "the last division forgotten"),
        Fault("the mask after the max", "                    s = s * scale if",
              "                    m_new = max(m_new, s * scale)\n                    s = s * scale if",
              "a hidden key's score in the maximum: live weights underflow", aim="masks", shown_by="early"),
        Fault("top-left causal", "allowed(mask, b, i + N_k - N, j + c)", "allowed(mask, b, i, j + c)",
              "causal order aligned at the top left where N_q ≠ N_k", aim="masks", shown_by="causal"),
        Fault("keys of the tile's first query", "seen(min(cuda.blockIdx.x * Br + Br, N) - 1 + N_k - N, N_k)",
              "seen(cuda.blockIdx.x * Br + N_k - N, N_k)", "causal: a tile skipped that later rows see", aim="masks",
              shown_by="causal"),
        Fault("a tail of keys dropped", "for j in range(0, keys, Bc):", "for j in range(0, keys // Bc * Bc, Bc):",
              "a dropped tail: N_k / Bc rounded down", shown_by="ragged"),
        Fault("a tail of queries dropped", "(tiles(N, Br), H)", "(max(1, N // Br), H)", "a grid rounded down",
              shown_by="ragged"),
        Fault("weights beyond the tail", "for c in range(min(Bc, keys - j)):", "for c in range(Bc):",
              "tail columns: stale scores enter the sum", times=2, at=1, shown_by="ragged"),
        Fault("no bounds on queries", "Q[h, i, t] if i < N else real(0)", "Q[h, i, t]",
              "a read beyond the last row, which a GPU answers", shown_by="ragged"),
        Fault("K heads interleaved", "g = h * K.shape[0] // Q.shape[0]", "g = h % K.shape[0]",
              "GQA by repeat in place of repeat_interleave", shown_by="heads"),
        Fault("the maximum of |S|", "m_new = max(m_new, s)", "m_new = max(m_new, abs(s))",
              "a maximum above the scores: the weights underflow", shown_by="low"),
        Fault("Q read again for each key", "s += Q_i[t] * K_j[c, t]", "s += Q[h, i, t] * K_j[c, t]",
              "right, with the traffic that the stage says it deletes", aim="bill", shown_by="bill"),
        Fault("no key skipped", "seen(min(cuda.blockIdx.x * Br + Br, N) - 1 + N_k - N, N_k)", "N_k",
              "causal: tiles read and thrown away", aim="bill", shown_by="causal bill"),
        Fault("lse in base 2", "math.log(l_i)", "math.log2(l_i)", "a base-2 softmax whose lse is not brought back"),
        Fault("L without m", "m_i + math.log(l_i) if", "math.log(l_i) if", "lse off by the row's maximum"),
        Fault("a row without keys", "O_i[t] / l_i if l_i != real(0) else real(0)", "O_i[t] / l_i",
              "0 / 0 in a row that sees no key", aim="masks", shown_by="early"),
        Fault("one column for all", "S_ij[c, r]", "S_ij[c, 0]", "threads that share a slot of shared memory",
              times=2, aim="races", shown_by="strict"),
        Fault("a return before the barrier", "m_i = real(-math.inf)",
              "m_i = real(-math.inf)\n        if i >= N: return",
              "a barrier that not all threads reach", shown_by="ragged"),
        Fault("l of dropped weights", "l_i += p  ", "l_i += p * keep(seed, p_drop, h, i, j + c)  ",
              "dropout before the softmax's sum", aim="masks", shown_by="dropout"),
        Fault("dropout by the key of a tile", "keep(seed, p_drop, h, i, j + c)", "keep(seed, p_drop, h, i, c)",
              "a random mask that depends on the tiles", aim="masks", shown_by="dropout"),
    ],
    "stages/flash2_backward.py": [
        Fault("D from O alone", "dO[h, i, t] * O[h, i, t]", "O[h, i, t]",
              "dO left out of D, unseen where a test has dO = ones"),
        Fault("D from dO alone", "dO[h, i, t] * O[h, i, t]", "dO[h, i, t] * dO[h, i, t]", "D from the wrong tensor"),
        Fault("one head of a group", "range(g * group, (g + 1) * group)", "range(g * group, g * group + 1)",
              "GQA not summed", shown_by="heads"),
        Fault("dK not scaled", "dK_j[t] * scale", "dK_j[t]", "scale missing in one gradient"),
        Fault("S not scaled in dQ", "s = s * scale if allowed(", "s = s if allowed(", "scale missing in one kernel"),
        Fault("a tail of keys dropped", "(tiles(N_k, Bc), G)", "(N_k // Bc, G)", "a grid rounded down",
              shown_by="ragged"),
        Fault("keys beyond the tail", "for c in range(min(Bc, keys - j)):", "for c in range(Bc):",
              "tail columns: NaN in dQ", shown_by="ragged"),
        Fault("queries beyond the tail", "for r in range(min(Br, N - i)):", "for r in range(Br):",
              "tail rows: stale queries in dK and dV", shown_by="ragged"),
        Fault("top-left causal in dK", "i + r + N_k - N, j + c)", "i + r, j + c)",
              "causal order aligned at the top left where N_q ≠ N_k", aim="masks", shown_by="causal"),
        Fault("dQ unmasked", "s * scale if allowed(mask, b, i + N_k - N, j + c) else real(-math.inf)", "s * scale",
              "a mask that the backward pass forgot", aim="masks", shown_by="causal"),
        Fault("a finite sentinel", "if is_allowed else real(-math.inf)", "if is_allowed else real(-1e4)",
              "−1e4 as the mask: hidden keys outweigh very negative scores", aim="masks", shown_by=""),
        Fault("dropout transposed", "keep(seed, p_drop, h, i + r, j + c)", "keep(seed, p_drop, h, j + c, i + r)",
              "another random mask than that of the forward pass", aim="masks", shown_by="dropout"),
        Fault("D within dropout", "(dp * z - D_i[r])", "(dp - D_i[r]) * z", "dS = Z ∘ P ∘ (dP − D)", aim="masks",
              shown_by="dropout"),
    ],
    "stages/register_tiled.py": [
        Fault("O not rescaled", "O_i[u, w] *= old", "pass", "O not rescaled when m grows"),
        Fault("l not rescaled", "l_i[u] *= old", "pass", "l not rescaled when m grows"),
        Fault("the maximum of one thread", "max(m_new, part[r, w])", "max(m_new, part[r, x])",
              "a maximum of one thread's keys where several threads share a row"),
        Fault("the sum of one thread", "l += part[r, w]", "l = part[r, w]", "a reduction that keeps the last part"),
        Fault("another thread's columns", "t = column(x, w)", "t = x + X * w", "fragments stored where others belong"),
        Fault("two columns skipped", "for t in range(4):", "for t in range(2):",
              "an unrolled loop with the wrong step"),
        Fault("scale missing", "S_ij[u, w] * scale if", "S_ij[u, w] if", "scale missing"),
        Fault("L without m", "m_i[u] + math.log(l)", "math.log(l)", "lse off by the row's maximum"),
        Fault("keys beyond the tail", "r < n_i and c < n_j and", "r < n_i and",
              "tail columns: scores of 0 enter the sum", shown_by="ragged"),
        Fault("top-left causal", "int64(i + r) + N_k - N, j + c)", "i + r, j + c)",
              "causal order aligned at the top left where N_q ≠ N_k", aim="masks", shown_by="causal"),
        Fault("K heads interleaved", "g = h * K.shape[0] // Q.shape[0]", "g = h % K.shape[0]",
              "GQA by repeat in place of repeat_interleave", shown_by="heads"),
    ],
    "stages/register_tiled_backward.py": [
        Fault("dK not scaled", "dK_j[u, w] * scale", "dK_j[u, w]", "scale missing in one gradient"),
        Fault("one head of a group", "range(g * group, (g + 1) * group)", "range(g * group, g * group + 1)",
              "GQA not summed", shown_by="heads"),
        Fault("D left out of dK", "p * (dP_ij[u, w] * z - D_i[r])", "p * dP_ij[u, w] * z",
              "the softmax's Jacobian without its second term"),
        Fault("dQ from P", "dS_ij[r, c] = p * (dP_ij[u, w] - D_i[r])", "dS_ij[r, c] = p", "P in place of dS"),
        Fault("dropout transposed in dQ", "dP_ij[u, w] *= keep(seed, p_drop, h, i + r, j + c)",
              "dP_ij[u, w] *= keep(seed, p_drop, h, j + c, i + r)",
              "another random mask than that of the forward pass", aim="masks", shown_by="dropout"),
        Fault("top-left causal", "int64(i + r) + N_k - N, j + c)", "i + r, j + c)",
              "causal order aligned at the top left where N_q ≠ N_k", times=2, aim="masks", shown_by="causal"),
    ],
    "stages/flash2_atomic_backward.py": [
        Fault("dQ added without an atomic", "cuda.atomic.add(dQ, (h, i + r, t), acc * scale)",
              "dQ[h, i + r, t] += acc * scale", "updates of other blocks lost", aim="races", shown_by="bill"),
        Fault("dQ not cleared", "launch(make_initialise_dQ(real), (tiles(N, ROWS), H), ROWS, dQ, device=device)",
              "pass", "a sum that starts from what the memory held"),
        Fault("D of the tile's first row", "- D_i[r])", "- D_i[0])", "D of another row"),
        Fault("dS after P", "dS_ij[r, c] = ds", "dS_ij[r, c] = p", "P in place of dS"),
        Fault("one query too few", "first(j + N - N_k)", "first(j + N - N_k + 1)",
              "causal: the diagonal skipped with its tile", aim="masks", shown_by="causal"),
    ],
    "stages/flash2_split.py": [
        Fault("splits not weighed", "w = weight(m_s[split, h, i], m)", "w = real(1)", "a mean of the partial outputs"),
        Fault("a split counts once", "l += w * l_s[split, h, i]", "l += w", "l of a split lost: each weighs one key"),
        Fault("m starts at 0", "m_i = real(-math.inf)", "m_i = real(0)", "an empty split has the maximum 0",
              shown_by="low"),
        Fault("a tail of keys dropped", "tiles(tiles(N_k, Bc), splits) * Bc", "tiles(N_k, Bc) // splits * Bc",
              "a dropped tail: tiles / splits rounded down"),
        Fault("O not rescaled", "acc = O_i[t] * old", "acc = O_i[t]", "O not rescaled when m grows"),
        Fault("hidden keys keep a score", "S_j[r] = real(-math.inf)", "pass", "stale shared memory", shown_by="keys"),
        Fault("top-left causal", "seen(i + N_k - N, N_k)", "seen(i, N_k)",
              "causal order aligned at the top left where N_q ≠ N_k", shown_by="causal"),
    ],
    "stages/__init__.py": [
        Fault("float32 whatever the dtype", "return from_dtype(dtype)", 'return __import__("numba").float32',
              "double precision lost inside", tests_of="flash2", shown_by=""),
    ],
    "dropout.py": [
        Fault("what is kept not scaled", "real(1 / (1 - p_drop)) if word", "real(1) if word",
              "inverted dropout without 1 / (1 − p)", aim="dropout", tests_of="naive"),
        Fault("kept with probability p", "word >= np.uint64(p_drop * WORDS)", "word < np.uint64(p_drop * WORDS)",
              "the probability to keep taken for that to drop", aim="dropout", tests_of="naive"),
        Fault("half of the seed", "k_0, k_1 = key & LOW, key >> HALF", "k_0, k_1 = key & LOW, key & LOW",
              "seeds that differ in their upper half draw the same", aim="dropout", tests_of="naive"),
        Fault("nine rounds", "ROUNDS = 10", "ROUNDS = 9", "a generator that is not the one it is said to be",
              aim="dropout", tests_of="naive"),
    ],
    "masks.py": [
        Fault("exp(−∞ − (−∞))", "(m if m > real(-math.inf) else real(0))", "m",
              "NaN where a row has seen no key so far", aim="masks", tests_of="online_softmax"),
        Fault("the diagonal hidden", "j > i:", "j >= i:", "causal order off by one",
              aim="masks", tests_of="naive"),
        Fault("the key mask upside down", "mask[b, j] != 0", "mask[b, j] == 0", "True taken for hidden",
              aim="masks", tests_of="naive"),
        Fault("one key mask for all", "mask[b, j] != 0", "mask[0, j] != 0", "the first batch's mask for every batch",
              aim="masks", tests_of="naive"),
        Fault("one key too few", "min(i + 1, N_k)", "min(i, N_k)", "causal: the last key of a tile's last row dropped",
              aim="masks", tests_of="flash2"),
        Fault("queries from before the first", "return max(0, j)", "return j",
              "a negative index, which a GPU answers", aim="masks", tests_of="flash"),
        Fault("block mask transposed", "block_mask[i // Br, j // Bc]", "block_mask[j // Bc, i // Br]",
              "rows and columns of tiles exchanged", aim="blocks", tests_of="flash2"),
        Fault("tiles from the diagonal on", "max(0, j) // step * step", "max(0, j)",
              "causal and block mask: tiles that are not those of the mask", aim="masks", tests_of="flash2_backward"),
    ],
}
# fmt: on


LATER = "stages/register_tiled"  # its files: the lab is about the stages of the ladder


def _mutants():
    """In the order of FAULTS, then the files that have barriers alone; of stages that run on the CPU engine."""
    stages = (path for path in (PACKAGE / "stages").glob("*.py") if path.stem.startswith(PORTABLE))
    for file in dict.fromkeys([*FAULTS, *sorted(path.relative_to(PACKAGE).as_posix() for path in stages)]):
        for fault in (*FAULTS.get(file, ()), *barriers(file)):
            yield Mutant(file, replace(fault, shown_by="") if file.startswith(LATER) else fault)


MUTANTS = list(_mutants())
