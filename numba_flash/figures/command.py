"""`python -m numba_flash figures`: the paper's figures as tables, as JSON, as CSV and as pictures."""

import csv
from io import StringIO
from pathlib import Path

from .. import output, report
from ..errors import KernelError
from ..files import write_text
from ..hbm import profiler
from ..lesson import check_distinct, check_writable, whole_number
from . import FIGURES, canvas

ALL = "all"
SIZES = {
    "n": (10**8, "N, the number of queries and of keys; the largest where a figure has several"),
    "d": (10**4, "d, the number of columns of a head"),
    "heads": (10**4, "number of heads"),
    "batch": (10**4, "size of the batch"),
}


def add_command(command):
    sub = command("figures", draw, "compute a figure of the paper, or list those there are")
    names = f"one of {', '.join(FIGURES)}; or {ALL}, one after the other"
    sub.add_argument("figure", nargs="?", choices=[*FIGURES, ALL], metavar="NAME", help=names)
    for flag, (most, meaning) in SIZES.items():
        theirs = ", ".join(f"{figure.PAPER[flag]} in {name}" for name, figure in FIGURES.items())
        meaning = f"{meaning} (default: the paper's, {theirs})"
        sub.add_argument(f"--{flag}", type=whole_number(1, most), metavar=flag[0].upper(), help=meaning)
    what = "run nothing; without it, kernels are counted, at one head and a size that takes seconds"
    sub.add_argument("--predict-only", action="store_true", help=what)
    what = f"on a GPU with Nsight Compute (ncu): add the bytes that DRAM moved, to {' and '.join(measuring(FIGURES))}"
    sub.add_argument("--measure", action="store_true", help=what)
    what = "write the figures to FILE, which ends in .csv, one number a row"
    sub.add_argument("--csv", type=output.writable(".csv"), metavar="FILE", help=what)
    what = f"draw the figure into FILE, which ends in {' or '.join(canvas.SUFFIXES)} (needs matplotlib); of {ALL}, each"
    sub.add_argument("--plot", type=output.writable(*canvas.SUFFIXES), metavar="FILE", help=what)
    output.add_json(sub)


def draw(flags):
    if not flags.figure:
        return list_figures(flags)
    chosen = FIGURES if flags.figure == ALL else {flags.figure: FIGURES[flags.figure]}
    plots = check(flags, chosen)
    results = {}
    for name, figure in chosen.items():
        sizes = {size: figure.PAPER[size] if getattr(flags, size) is None else getattr(flags, size) for size in SIZES}
        results[name] = figure.compute(**sizes, run=not flags.predict_only, measure=flags.measure)
        if flags.json != "-":
            output.show(figure.page(results[name]))
    output.write(results if flags.figure == ALL else results[flags.figure], flags.json)
    if flags.csv:
        write_text(flags.csv, as_csv(results))
    for name, path in plots.items():
        canvas.save(FIGURES[name].plot, results[name], path)
    if flags.json != "-":
        for path in filter(None, (flags.csv, *plots.values())):
            report.console().print(f" written: {path}", soft_wrap=True)
    for figures in results.values():
        if flags.measure and (why := (figures.get("measured") or {}).get("why")):
            raise KernelError("; ".join(dict.fromkeys(why.values())))
    return 1 if any(figures.get("equal") is False for figures in results.values()) else 0


def list_figures(flags):
    first = next(iter(FIGURES))
    for name in (*SIZES, "predict_only", "measure", "csv", "plot"):
        if getattr(flags, name) not in (None, False):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is for a figure: name one, for example figures {first}, or {ALL}")
    titles = {name: figure.TITLE for name, figure in FIGURES.items()}
    how = f"Print one by its name, or {ALL}:\n   python -m numba_flash figures {first}"
    output.show([report.table(["name", "figure"], list(titles.items())), "", report.prose(how)], titles, flags.json)
    return 0


def measuring(figures):
    """The names of those that measure."""
    return [name for name, figure in figures.items() if getattr(figure, "MEASURES", False)]


def check(flags, chosen):
    """ValueError where it is plain before the run that something cannot be done -> {figure: path of its picture}."""
    plots = {}
    if flags.plot:
        canvas.refuse()
        path = Path(flags.plot)
        plots = {flags.figure: flags.plot}
        if flags.figure == ALL:
            plots = {name: str(path.with_name(f"{path.stem}-{name}{path.suffix}")) for name in chosen}
            for one in plots.values():
                check_writable(one)
    check_distinct(json=flags.json, csv=flags.csv, **{f"plot of {name}": path for name, path in plots.items()})
    if flags.measure:
        if not measuring(chosen):
            raise ValueError(f"--measure is for figures {' and '.join(measuring(FIGURES))}: leave it out")
        profiler.refuse(predict_only=flags.predict_only)
    return plots


def as_csv(results):
    """The rows of figures as CSV, each with the name of its figure; what a figure does not have is left empty."""
    rows = [{"figure": name, **row} for name, figures in results.items() for row in FIGURES[name].rows(figures)]
    text = StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
