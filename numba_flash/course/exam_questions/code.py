"""Slips for the exam's code reading: one line of a stage wrong, missing or at the wrong place, and what shows it."""

import inspect
import re
import textwrap
from dataclasses import dataclass
from importlib import import_module

from .pool import Part, lettered, question

SYMPTOMS = {
    "bounds": "An index out of range, at lengths that the sides of a block do not divide: an error here, "
    "and on a GPU none, but elements that belong elsewhere are read and overwritten.",
    "race": "A race in strict mode; on a GPU a result that may differ from run to run.",
    "divergence": "Some threads never come to a barrier, at lengths that the tile does not divide: an error here, "
    "and on a GPU perhaps a hang.",
    "rising": "A wrong O without an error message, and only for rows whose largest score so far rises after the "
    "first tile; right for all others.",
    "second_tile": "A wrong O without an error message for every row, as soon as there are two tiles of keys; right "
    "with one.",
    "one_tile": "A wrong O without an error message for every row, with one tile as with several.",
    "tail": "A wrong O, or nan in it, and only where the tile does not divide the number of keys.",
    "low": "A wrong O, 0 or nan, and only for rows whose scores all lie far below 0.",
    "dQ": "O, dK and dV are right; dQ is wrong.",
    "gradients": "O is right, and all three gradients are wrong.",
}

GPU_MAY_SHOW = {"bounds": {"race", "tail"}}  # beside the symptom: no wrong choices


@dataclass(frozen=True)
class Slip:
    """`old`, a text that stands `times` times in the source of `factory`, becomes `new`. bill: whether it changes."""

    name: str
    where: str
    module: str
    factory: str
    old: str
    new: str
    symptom: str
    what: str
    then: str
    wrong: tuple
    first: str = ""  # the snippet begins with the last line before its end that holds this text, or below the head
    last: str = ""  # and ends with the last line that holds this one
    bill: str = ""
    times: int = 1

    def apply(self, source):
        """The source with the slip in it. ValueError where it does not fit."""
        if source.count(self.old) != self.times:
            raise ValueError(f"{self.name}: {self.old!r} stands {source.count(self.old)} times, not {self.times}")
        return source.replace(self.old, self.new)


def snippet(slip):
    """The lines of a stage with the slip in it, without comments, masks, dropout and heads that share K and V."""
    factory = getattr(import_module(f"numba_flash.stages.{slip.module}"), slip.factory)
    source = slip.apply(inspect.getsource(factory))
    kernel = source[source.index("@cuda.jit") :].partition("\n\n    return")[0]
    lines = [re.sub(r"\s*#.*", "", line) for line in kernel.splitlines()]
    lines = [
        line
        for line in lines
        if line.strip() and not re.search(r"^\s*((g|b) = h \*|\w+ \*= keep|if not visited|continue)", line)
    ]
    end = max((n for n, line in enumerate(lines) if slip.last in line), default=0)
    begin = max((n for n, line in enumerate(lines[:end]) if slip.first in line), default=0) if slip.first else 1
    text = "\n".join(lines[begin : end + 1])
    text = re.sub(r"s \* scale if allowed\([^)]*\) else real\(-math\.inf\)", "s * scale", text)
    text = re.sub(r"is_allowed = allowed.*\n *S\[h, row, col\] = .*", "S[h, row, col] = acc * scale", text)
    text = re.sub(r"acc \* scale if allowed\([^)]*\) else real\(-math\.inf\)", "acc * scale", text)
    text = re.sub(r" \* keep\([^)]*\)", "", text)
    text = re.sub(r"(?<=[\[ ])g(?=,)", "h", text).replace(" mask, ", " ")
    return textwrap.dedent(text).splitlines()


BARRIER_OF_FLASH2 = "            cuda.syncthreads()                               # K_j and V_j are complete\n"
BARRIER_1 = "            cuda.syncthreads()                               # both tiles are complete\n"
BARRIER_2 = (
    "            cuda.syncthreads()                               # nobody still reads what the next step overwrites\n"
)

SLIPS = (
    Slip(
        "l_not_rescaled",
        "the loop over tiles of keys of `flash2`",
        "flash2",
        "make_forward",
        "                l_i *= old\n",
        "",
        "rising",
        "l_i is not multiplied by `old`",
        "where m rises, the terms of earlier tiles stay too large in l, so O comes out too small",
        (
            ("every row is wrong", "where the first tile holds the maximum `old` is 1, and nothing is missing"),
            ("nan", "l is too large, not 0"),
        ),
        "if i < N:",
        "cuda.syncthreads()",
        "no",
    ),
    Slip(
        "O_not_rescaled",
        "the loop over tiles of keys of `flash2`",
        "flash2",
        "make_forward",
        "                for t in range(d):\n                    O_i[t] *= old                            # Alg. 1, l. "
        "10\n",
        "",
        "rising",
        "O_i is not multiplied by `old`, as l_i is",
        "where m rises, the values of earlier tiles weigh too much in O",
        (
            ("the division at the end mends it", "l was rescaled and O was not: their quotient is off"),
            ("every row is wrong", "where the first tile holds the maximum `old` is 1"),
        ),
        "if i < N:",
        "cuda.syncthreads()",
        "no",
    ),
    Slip(
        "no_barrier_1",
        "the scores of `tiled`",
        "tiled",
        "make_scores",
        BARRIER_1,
        "",
        "race",
        "the barrier between filling the tiles and using them is missing",
        "a thread may read an element that its neighbour has not loaded yet",
        (("an index out of range", "the indices are right; the time is not"),),
        "acc = real(0)",
        "S[h, row, col]",
        "no",
    ),
    Slip(
        "no_barrier_2",
        "the scores of `tiled`",
        "tiled",
        "make_scores",
        BARRIER_2,
        "",
        "race",
        "the barrier after the use of the tiles is missing",
        "a fast thread overwrites, in its next step, a tile that a slow one still reads",
        (("nothing, the tiles are complete", "complete for this step; the next step overwrites them"),),
        "acc = real(0)",
        "S[h, row, col]",
        "no",
    ),
    Slip(
        "barrier_in_guard",
        "the loop over tiles of keys of `flash2`",
        "flash2",
        "make_forward",
        BARRIER_OF_FLASH2 + "            if i < N:\n                m_new = m_i\n",
        "            if i < N:\n                cuda.syncthreads()\n                m_new = m_i\n",
        "divergence",
        "the barrier stands inside the guard i < N",
        "threads beyond the last query, in the last tile, never come to it, and the others wait for them",
        (("nothing, idle threads have no part", "they load their share of K_j and V_j, and the others wait for them"),),
        "for e in range(r",
        "m_new = max(m_new, s)",
    ),
    Slip(
        "columns_of_K",
        "the scores of `tiled`",
        "tiled",
        "make_scores",
        "* K_j[tx, t]",
        "* K_j[t, tx]",
        "one_tile",
        "K_j is read with its indices exchanged",
        "the thread multiplies its row of Q by a column of the tile of K, which mixes keys",
        (
            ("an index out of range", "both indices stay below T"),
            ("the bill changes", "the loads are the same; their use is wrong"),
        ),
        "acc = real(0)",
        "S[h, row, col]",
        "no",
    ),
    Slip(
        "half_a_guard",
        "the scores of `naive`",
        "naive",
        "make_scores",
        "if i < N and j < N_k:",
        "if i < N:",
        "bounds",
        "the guard checks the query and not the key",
        "threads beyond the last key load rows of K that are not there, and store S[h, i, j] with j ≥ N_k: on a GPU "
        "that is no error but the start of row i + 1, so that right scores are overwritten; after the last row it is "
        "memory beyond S",
        (
            ("only idle threads", "they are not idle: they load and store"),
            ("only wrong loads", "what they load is theirs alone; their stores hit the scores of the next row"),
        ),
    ),
    Slip(
        "m_from_0",
        "the statistics of `online_softmax`",
        "online_softmax",
        "make_statistics",
        "m_i = real(-math.inf)",
        "m_i = real(0)",
        "low",
        "m starts at 0, as if there were a key with that score",
        "where all scores are far below 0, every exponential is 0, and so is l",
        (
            ("every row with negative scores is wrong", "near 0 a maximum that is too large costs digits alone"),
            ("nothing at all", "so it looks in tests with small scores"),
        ),
        bill="no",
    ),
    Slip(
        "statistics_not_rescaled",
        "the statistics of `online_softmax`, whose tile is one score",
        "online_softmax",
        "make_statistics",
        "l_i * weight(m_i, m_new) + weight(s, m_new)",
        "l_i + weight(s, m_new)",
        "rising",
        "l_i is not rescaled when m rises",
        "terms taken with an older, smaller m stay too large in l, so the weights sum to less than 1",
        (("every row is wrong", "not where the first score is the largest"),),
        bill="no",
    ),
    Slip(
        "whole_tile",
        "the loop over tiles of keys of `flash2`",
        "flash2",
        "make_forward",
        "for c in range(min(Bc, keys - j)):",
        "for c in range(Bc):",
        "tail",
        "both loops over c run to Bc, also in the last tile, which may hold fewer keys",
        "rows of K_j and V_j that this tile did not fill count as keys: those of the tile before, or nan",
        (("an index out of range", "K_j and V_j have Bc rows; the index is inside, the contents are old"),),
        "for e in range(r",
        "cuda.syncthreads()",
        "no",
        2,
    ),
    Slip(
        "l_not_stored",
        "the end of the loop over queries of `flash` (Algorithm 1)",
        "flash",
        "make_forward",
        "                l[h, i] = l_i                                # Alg. 1, l. 13\n",
        "",
        "second_tile",
        "l_i is not stored (line 13)",
        "the next tile of keys loads the old l, 0, and forgets all tiles before it",
        (("only where m rises", "l is lost whatever m does"), ("the bill stays", "Tc·N stores of l are missing")),
        "if l_tile != ",
        "m[h, i] = m_i",
        "yes",
    ),
    Slip(
        "no_D",
        "the kernel of `flash2` that owns dQ",
        "flash2_backward",
        "make_dQ",
        "weight(s, L_i) * (dp - D_i)",
        "weight(s, L_i) * dp",
        "dQ",
        "D_i is not subtracted from dp",
        "the weights of a row depend on each other through their sum; dS, and with it dQ, is wrong",
        (("dK is wrong, too", "another kernel owns dK, with a dS of its own"),),
        "for j in range(0, keys",
        "dQ[h, i, t] = ",
        "no",
    ),
    Slip(
        "L_without_m",
        "the end of `flash2`",
        "flash2",
        "make_forward",
        "m_i + math.log(l_i) if",
        "math.log(l_i) if",
        "gradients",
        "L is log l without m",
        "O does not need L, but the backward pass forms P = exp(S − L), which is off by the factor exp(m)",
        (("the output is wrong", "O is divided by l, in which m has been taken care of"),),
        "if i < N:",
        "L[h, i]",
        "no",
    ),
)


def one_of(slips):
    """A question on one of the slips of the same lines, so that no exam shows these lines twice."""

    def make(rng):
        slip = rng.choice(slips)
        others = rng.sample(sorted(set(SYMPTOMS) - {slip.symptom} - GPU_MAY_SHOW.get(slip.symptom, set())), 4)
        choices, letter = lettered(rng, SYMPTOMS[slip.symptom], [SYMPTOMS[other] for other in others])
        parts = [Part("Which symptom shows it?", letter, 2)]
        if slip.bill:
            parts.append(Part("Does the HBM bill change (yes or no)?", slip.bill))
        return {
            "text": f"From {slip.where}, with one fault planted: a line is wrong, missing, or at the wrong place "
            "(masks and dropout are left out, and each head has its own K and V). Say in one or two "
            "sentences what is wrong and what goes wrong then.\n\n"
            + "\n".join(f"    {line}" for line in snippet(slip)),
            "choices": choices,
            "parts": tuple(parts),
            "open": ((1, f"what is wrong: {slip.what}"), (1, f"what goes wrong: {slip.then}")),
            "why": f"{_sentence(slip.what)} {_sentence(slip.then)}",
            "wrong": slip.wrong,
            "facts": {"slip": slip.name},
        }

    return make


def _sentence(text):
    """With a capital, unless it begins with a name."""
    first = text.split()[0]
    return (text if "_" in first or (len(first) == 1 and first != "a") else text[0].upper() + text[1:]) + "."


for _name, _lesson, _slips in (
    ("code_scores", "00, part 3; 02, part 2", ["half_a_guard"]),
    ("code_tiled", "03, parts 2 and 7", ["no_barrier_1", "no_barrier_2", "columns_of_K"]),
    ("code_statistics", "04, parts 6 and 7", ["m_from_0", "statistics_not_rescaled"]),
    ("code_algorithm1", "05, part 2", ["l_not_stored"]),
    ("code_loop", "04, part 2; 05, part 7", ["l_not_rescaled", "O_not_rescaled", "whole_tile", "barrier_in_guard"]),
    ("code_L", "04, part 5; 07, part 4", ["L_without_m"]),
    ("code_dQ", "07, parts 2 and 7", ["no_D"]),
):
    question("code", _lesson, 5, _name)(one_of([slip for slip in SLIPS if slip.name in _slips]))
