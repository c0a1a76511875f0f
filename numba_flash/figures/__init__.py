"""The paper's figures, computed: `python -m numba_flash figures NAME`.

Each is a module: TITLE; PAPER, the paper's configuration; compute(n, d, heads, batch, run, measure) -> figures, a
dictionary for JSON, whose "equal" is False where something is not as it must be; page(figures) -> what is printed;
rows(figures) -> dictionaries with the same keys, one number each, for CSV; plot(figures, canvas), which draws on a
Figure of matplotlib; MEASURES, True where `measure` asks ncu for something.
"""

from . import left, memory, middle, right, theorem5

FIGURES = {"left": left, "middle": middle, "right": right, "memory": memory, "theorem5": theorem5}
