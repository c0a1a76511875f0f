"""Exercises of lesson 04: the online softmax, and parts that become one."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake, Share
from .common import LOWEST, SENTINEL, cases, no_rescale, normal, weights


def _rows(rng, N, N_k, special=True):
    S, V = normal(rng, N, N_k, size=2.5), normal(rng, N_k, mean=1.0)
    if special:
        S[1::5] += 300 + np.arange(N_k)
        S[2::5] -= 400
        S[3::5, : max(N_k // 2, 1)] = -np.inf
        S[4::5] = -np.inf
        S[5::10] = LOWEST
    return S, V


def _part(rng, N, d, far):
    m, l, O = normal(rng, N, size=3.0), 1 + np.abs(normal(rng, N, size=5.0)), normal(rng, N, d, mean=1.0)
    m[far::6] += 200
    return m, l, O


def _two_parts(rng, N, d, special=True):
    one, two = _part(rng, N, d, 1), _part(rng, N, d, 2)
    if special:
        for (m, l, O), rows in ((one, (3, 5)), (two, (4, 5))):
            for row in rows:
                m[row::6], l[row::6], O[row::6] = -np.inf, 0, 0
    return *one, *two


def _merged(m_1, l_1, O_1, m_2, l_2, O_2, *, m=None, divided=True, guard=True, scaled=(True, True),
            counted=(1, 1), counted_in_O=(1, 1)):  # fmt: skip
    """O, l and m of two parts, with a slip. counted: 0 where a part's l is taken for 1."""
    m = np.maximum(m_1, m_2) if m is None else m
    w_1, w_2 = (
        np.where(guard & np.isneginf(x), 0, np.exp(x - m)) if comes else np.ones_like(m)
        for x, comes in zip((m_1, m_2), scaled)
    )
    l_1, l_2 = (l if there else np.ones_like(l) for l, there in zip((l_1, l_2), counted))
    l = w_1 * l_1 + w_2 * l_2
    a, b = (w * l if there else w for w, l, there in ((w_1, l_1, counted_in_O[0]), (w_2, l_2, counted_in_O[1])))
    O = a[:, None] * O_1 + b[:, None] * O_2
    return m, l, O / (np.where(l == 0, 1, l) if guard else l)[:, None] if divided else O


def _plain_sum(m_1, l_1, O_1, m_2, l_2, O_2):
    l = l_1 + l_2
    O = (l_1[:, None] * O_1 + l_2[:, None] * O_2) / np.where(l == 0, 1, l)[:, None]
    return np.maximum(m_1, m_2), l, O


EXERCISES = (
    Exercise(
        name="04_online",
        answer="online",
        outputs=("O",),
        inputs=cases(
            8,
            _rows,
            {"N": 37, "N_k": 19},
            {"N": 1, "N_k": 1, "_special": False},
            {"N": 32, "N_k": 8},
            {"N": 6, "N_k": 40},
        ),
        sizes=lambda S, V: {"N": S.shape[0], "N_k": S.shape[1]},
        bill=(
            Bound(
                "S",
                "loads",
                "N*N_k",
                "one pass",
                "S is loaded twice: one pass is enough, and S[i, j] belongs in a variable",
            ),
            Bound("V", "loads", "N*N_k", "one pass", "V[j] is loaded twice"),
            Bound(
                "O", "stores", "N", "one per row", "O is stored for every key: l·O belongs in a variable until the end"
            ),
            Bound("O", "loads", "0", "O is a result", "O is carried along in HBM: l·O belongs in a variable"),
        ),
        share=(Share("HBM", "2*N_k + 1", "its row of S, V and one store"),),
        hints=(
            "Three variables are carried along: m, l and l·O. Each key is a tile of one score. Which of the three "
            "must be rescaled when m grows?",
            "l and l·O are both sums of terms with exp(S_ij - m) in them, so both are multiplied by weight(m_i, "
            "m_new), before the new key is added.",
            "In the loop: s = S[i, j], m_new = max(m_i, s), old = weight(m_i, m_new), p = weight(s, m_new), l_i = "
            "l_i * old + p, lO_i = lO_i * old + p * V[j], m_i = m_new. After it O[i] = lO_i / l_i, or 0 if l_i is 0.",
        ),
        mistakes=(
            Mistake(
                "l·O is not rescaled when m grows: its old terms still have the old m in them.",
                lambda S, V: no_rescale(S, V, 1, O=False),
            ),
            Mistake(
                "l is not rescaled when m grows: its old terms still have the old m in them.",
                lambda S, V: no_rescale(S, V, 1, l=False),
            ),
            Mistake(
                "Neither l nor l·O is rescaled when m grows: their old terms still have the old m in them.",
                lambda S, V: no_rescale(S, V, 1, l=False, O=False),
            ),
            Mistake(
                "That is l·O: it is not divided by l.", lambda S, V: weights(S, l=np.ones((len(S), 1), np.float32)) @ V
            ),
            Mistake(
                "m begins at 0, not at -∞: where all scores are far below 0, all weights are 0.",
                lambda S, V: weights(S, m=np.maximum(S.max(axis=1, keepdims=True), 0)) @ V,
            ),
            Mistake(
                "m begins at 0, not at -∞: where all scores are far below 0, l is 0, and 0/0 is nan.",
                lambda S, V: weights(S, m=np.maximum(S.max(axis=1, keepdims=True), 0), guard=False) @ V,
            ),
            Mistake(
                "m begins at a finite number, not at -∞: where all scores are lower still, l is 0, and so is O.",
                lambda S, V: weights(S, m=np.maximum(S.max(axis=1, keepdims=True), SENTINEL)) @ V,
            ),
            Mistake(
                "m begins at a finite number, not at -∞: where all scores are lower still, l is 0, and 0/0 is nan.",
                lambda S, V: weights(S, m=np.maximum(S.max(axis=1, keepdims=True), SENTINEL), guard=False) @ V,
            ),
            Mistake(
                "In a row of -∞ alone l is 0, and 0/0 is nan: store 0 there.",
                lambda S, V: weights(S, guard=False) @ V,
            ),
            Mistake(
                "exp(-∞ - (-∞)) is nan: use weight, which is 0 where the score is -∞.",
                lambda S, V: np.where(np.isneginf(S[:, 0]), np.nan, weights(S) @ V),
            ),
        ),
        faults={
            "RaceDetected": "a thread has one row, i.",
            "UninitializedRead": "O is read before anything is in it: carry l·O in a variable.",
            "wrong": "compare with `add_tile` in lesson 04, line by line, for a tile of one score.",
        },
    ),
    Exercise(
        name="04_merge",
        answer="merge",
        outputs=("m", "l", "O"),
        inputs=cases(9, _two_parts, {"N": 37, "d": 5}, {"N": 1, "d": 1, "_special": False}, {"N": 32, "d": 8}),
        sizes=lambda m_1, l_1, O_1, *rest: {"N": len(m_1), "d": O_1.shape[1]},
        bill=(
            *(
                Bound(
                    f"{x}_{part}",
                    "loads",
                    "N",
                    "once per query",
                    f"{x}_{part}[i] is loaded more than once: give it a name, a register",
                )
                for x in "ml"
                for part in "12"
            ),
            *(
                Bound(f"O_{part}", "loads", "N*d", "each element once", f"an element of O_{part} is loaded twice")
                for part in "12"
            ),
            *(Bound(x, "stores", "N", "once per query", f"{x}[i] is stored twice") for x in "ml"),
            Bound("O", "stores", "N*d", "each element once", "O is stored twice: divide before you store"),
            Bound("O", "loads", "0", "O is a result", "O is stored, loaded and divided: divide before you store"),
        ),
        share=(Share("HBM", "3*d + 6", "what belongs to its own query"),),
        hints=(
            "The new m is the larger of the two. Each part has its sums in its own scale: with which factor does it "
            "come to the new one?",
            "weight(m_1, m) is that factor for part 1. Then l is a sum of two terms. O_1 is divided by l_1 already, "
            "so it was l_1·O_1 that grew as a sum, and that is what is added.",
            "a, b = m_1[i], m_2[i]; m_new = max(a, b); part_1 = weight(a, m_new) * l_1[i], part_2 likewise; l_new is "
            "their sum; O[i, t] = (part_1 * O_1[i, t] + part_2 * O_2[i, t]) / l_new, or 0 if l_new is 0.",
        ),
        mistakes=(
            Mistake(
                "O_1 and O_2 are added without their l. They are divided by l already, so multiply by it first.",
                lambda *x: _merged(*x, counted_in_O=(0, 0)),
            ),
            Mistake("O is not divided by the new l.", lambda *x: _merged(*x, divided=False)),
            Mistake(
                "Where no part has a key, O became nan: exp(-∞ - (-∞)), or 0/0. There m is -∞, l is 0 and O is 0.",
                lambda *x: _merged(*x, guard=False),
            ),
            Mistake(
                "Where no part has a key, l is 0, and 0/0 is nan: store 0 in O there.",
                lambda *x: (*_merged(*x)[:2], np.where((_merged(*x)[1] == 0)[:, None], np.nan, _merged(*x)[2])),
            ),
            Mistake(
                "The two m must not be added: the new m is the larger one.", lambda *x: (x[0] + x[3], *_merged(*x)[1:])
            ),
            Mistake(
                "l is l_1 + l_2 here: each of the two must come to the new scale first, times weight(m_1, m).",
                _plain_sum,
            ),
            *(
                Mistake(
                    f"Part {part} is not brought to the new scale: its l is to be multiplied by weight(m_{part}, m).",
                    lambda *x, scaled=scaled: _merged(*x, scaled=scaled),
                )
                for part, scaled in ((1, (False, True)), (2, (True, False)))
            ),
            Mistake(
                "l_1 and l_2 are left out: each part counts with weight(m_1, m)·l_1, and likewise for part 2.",
                lambda *x: _merged(*x, counted=(0, 0)),
            ),
            *(
                Mistake(
                    f"l_{part} is left out: part {part} counts with weight(m_{part}, m)·l_{part}.",
                    lambda *x, counted=counted: _merged(*x, counted=counted),
                )
                for part, counted in ((1, (0, 1)), (2, (1, 0)))
            ),
            *(
                Mistake(
                    f"In O l_{part} is left out. O_{part} is divided by it already, so multiply by it first.",
                    lambda *x, counted=counted: _merged(*x, counted_in_O=counted),
                )
                for part, counted in ((1, (0, 1)), (2, (1, 0)))
            ),
            Mistake(
                "That is the mean of O_1 and O_2. Each counts as much as its part of the new l.",
                lambda *x: (*_merged(*x)[:2], (x[2] + x[5]) / 2),
            ),
            Mistake(
                "That is the sum of O_1 and O_2. Each counts as much as its part of the new l.",
                lambda *x: (*_merged(*x)[:2], x[2] + x[5]),
            ),
            *(
                Mistake(
                    f"O_{gone} is left out: O is the sum of what both parts bring.",
                    lambda *x, at=at: _merged(*x[:at], np.zeros_like(x[at]), *x[at + 1 :]),
                )
                for gone, at in ((1, 2), (2, 5))
            ),
            Mistake("The new m is m_1, also where m_2 is larger.", lambda *x: _merged(*x, m=x[0])),
        ),
        faults={"RaceDetected": "a thread has one query, i.", "unwritten": "m, l and O are all results: store each."},
    ),
)
