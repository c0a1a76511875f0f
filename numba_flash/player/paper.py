"""The algorithms that the stages follow, in our words and with the line numbers of the papers.

A line belongs to a frame where its number is one that the kernel's comments name; a line without a number, where the
frame is of its kernel.
"""

from typing import NamedTuple


class Line(NamedTuple):
    number: int | None
    kernel: str
    text: str


class Algorithm(NamedTuple):
    name: str
    link: str
    lines: tuple


FLASH = "https://arxiv.org/abs/2205.14135"
FLASH2 = "https://arxiv.org/abs/2307.08691"

THREE_STEPS = Algorithm(
    "Algorithm 0: standard attention",
    FLASH,
    (
        Line(1, "scores", "S = Q Kᵀ: read Q and K from HBM, write S to HBM"),
        Line(2, "softmax", "P = softmax(S): read S, write P"),
        Line(3, "output", "O = P V: read P and V, write O"),
    ),
)

ALGORITHMS = {
    "naive": THREE_STEPS,
    "tiled": THREE_STEPS,
    "online_softmax": Algorithm(
        "Algorithm 0 without P: online softmax (section 3.1)",
        FLASH,
        (
            Line(1, "scores", "S = Q Kᵀ: read Q and K from HBM, write S to HBM"),
            Line(None, "statistics", "m, l: one pass over each row of S; m grows, l is rescaled to it"),
            Line(None, "output", "O = (exp(S − m) / l) V: P lives one tile at a time, in SRAM"),
        ),
    ),
    "flash": Algorithm(
        "Algorithm 1: FlashAttention",
        FLASH,
        (
            Line(1, "", "choose Bc keys and Br queries a tile, so that tiles of Q, K, V, O fit on chip"),
            Line(2, "", "in HBM: O = 0, l = 0, m = −∞"),
            Line(3, "", "cut Q into Tr tiles of Br rows, K and V into Tc tiles of Bc rows"),
            Line(4, "", "cut O, l and m into Tr tiles too"),
            Line(5, "", "for each tile j of keys"),
            Line(6, "", "    load K_j, V_j into SRAM"),
            Line(7, "", "    for each tile i of queries"),
            Line(8, "", "        load Q_i, O_i, l_i, m_i"),
            Line(9, "", "        S_ij = Q_i K_jᵀ, on chip"),
            Line(10, "", "        m_tile = row maxima of S_ij; P_ij = exp(S_ij − m_tile); l_tile = row sums of P_ij"),
            Line(11, "", "        m_new = max(m_i, m_tile); l_new = e^(m_i − m_new) l_i + e^(m_tile − m_new) l_tile"),
            Line(12, "", "        write O_i = (l_i e^(m_i − m_new) O_i + e^(m_tile − m_new) P_ij V_j) / l_new"),
            Line(13, "", "        write l_i = l_new, m_i = m_new"),
        ),
    ),
    "flash2": Algorithm(
        "FlashAttention-2, Algorithm 1",
        FLASH2,
        (
            Line(1, "", "cut Q into Tr tiles of Br rows, K and V into Tc tiles of Bc rows"),
            Line(2, "", "cut O and L into Tr tiles too"),
            Line(3, "", "for each tile i of queries"),
            Line(4, "", "    load Q_i"),
            Line(5, "", "    on chip: O_i = 0, l_i = 0, m_i = −∞"),
            Line(6, "", "    for each tile j of keys"),
            Line(7, "", "        load K_j, V_j into SRAM"),
            Line(8, "", "        S_ij = Q_i K_jᵀ, on chip"),
            Line(
                9,
                "",
                "        m_new = max(m_i, max S_ij); P_ij = exp(S_ij − m_new); l_i = e^(m_i − m_new) l_i + Σ P_ij",
            ),
            Line(10, "", "        O_i = e^(m_i − m_new) O_i + P_ij V_j"),
            Line(12, "", "    O_i = O_i / l_i"),
            Line(13, "", "    L_i = m_i + log l_i"),
            Line(14, "", "    write O_i"),
            Line(15, "", "    write L_i"),
        ),
    ),
}


def lit(algorithm, paper, kernel):
    """Which lines of the algorithm belong to a frame: their positions."""
    lines = enumerate(algorithm.lines)
    return [n for n, line in lines if line.kernel in ("", kernel) and (line.number is None or line.number in paper)]
