"""What every lesson script shares: its flags, its parts, its figures and its way out.

    this = lesson.start("03 · tiled", blocks=16, stage="tiled")     # reads the flags: this.n, this.d, this.blocks, ...
    this.part("The question")                                        # a heading; with --step it waits for Enter
    this.text("One idea per paragraph.")
    x = this.draw(N=range(100, 400, 20), T=(8, 16))                  # sizes for a question, by --seed
    this.ask("A formula for each tensor?", Question("Q loads", x, ...))   # on a terminal it is asked and judged
    this.bill("tiled", counted, predicted=predicted)                 # prints the bill, keeps it for --json
    this.end()                                                       # writes what --json and --svg asked for

In a notebook there are no flags: the values given to `start` hold. Without a terminal nobody is asked.
"""

import argparse
import inspect
import json
import linecache
import math
import os
import random
import re
import sys
import tempfile
import textwrap
import traceback
from functools import cached_property
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from . import notebook, picture, questions, reference, report, testing
from .attention import MAX_D
from .blocks import TILINGS, fitting_blocks
from .course.exercises import EXERCISES
from .engine.launch import device
from .engine.model import GRID_YZ, THREADS
from .engine.rewrite import function_of
from .errors import KernelError
from .files import write_text
from .hbm import profiler
from .hbm.ledger import KINDS, Count

PROMPT = " [Enter: go on   Ctrl-D: all the rest   Ctrl-C: stop] "
ANSWER = " Your answer (? for a hint): "
HOW_TO_ANSWER = """
Type a number, such as 4,194,304 or 2**22, or a formula with these letters, such as 2*N or ceil(N/3), which is rounded
up. There are two tries. Enter alone goes on, Ctrl-D asks no more.
"""
ROWS = 256  # queries whose reference is computed at once
SIZES = "N = {n}, d = {d}, float32, {heads}"


def start(
    name,
    *,
    n=1024,
    d=64,
    heads=1,
    blocks=16,
    seed=0,
    stage=None,
    direction="forward",
    predict_only=False,
    sizes=SIZES,
    meanings=None,
    extra=None,
):
    """Read the flags and check them, print the heading -> Lesson. A bad flag ends the script with exit status 2.

    name: number and title, "03 · tiled". n to seed: what the flags are when left out. stage: --blocks is the side T of
    its tiles, or Br,Bc for a stage whose tiles are no squares, where blocks=None leaves the choice to the stage;
    without a stage it is the number of threads per block. direction: the pass that the tiles are for; with "split",
    where a block has one query, --blocks is Bc alone. predict_only: the lesson predicts that stage and does not run it,
    so that a tile of any size will do. sizes: what the heading says of the run, from {n}, {d}, {heads}, {blocks} and
    {threads}. meanings: flag -> what --help says of it, where that is special to the lesson. extra: flags of this
    lesson alone, name -> (default, argparse type, METAVAR, what it means); each becomes an attribute too. One whose
    default is False takes no value. `measure` asks ncu, and is refused where that cannot be.
    """
    extra = extra or {}
    values = {"n": n, "d": d, "heads": heads, "blocks": blocks, "seed": seed, "device": None}
    values |= {flag: default for flag, (default, *_) in extra.items()}
    parser = _parser(name, values, stage, direction, predict_only, meanings or {}, extra)
    flags = parser.parse_args([] if in_notebook() else sys.argv[1:])
    sides = (1, flags.blocks) if direction == "split" and flags.blocks else flags.blocks
    where = "argument --device" if flags.device else "environment"
    for what, check in (
        (
            "argument --blocks",
            lambda: (
                stage
                and not predict_only
                and fitting_blocks(stage, sides, d=flags.d, dtype="float32", direction=direction)
            ),
        ),
        (where, lambda: device(flags.device)),
        ("flags", lambda: getattr(flags, "measure", False) and refuse_measuring(flags)),
        ("argument --json", lambda: check_writable(flags.json)),
        ("argument --svg", lambda: check_writable(flags.svg, (".svg", ".html"))),
        ("argument --answers", lambda: check_answers(flags.answers)),
        ("flags", lambda: check_distinct(**{name: getattr(flags, name) for name in ("json", "svg", "answers")})),
        ("argument --notebook", lambda: check_writable(flags.notebook, (".ipynb",))),
        ("argument --notebook", lambda: check_alone(flags, "notebook", ("json", "svg", "answers"))),
    ):
        try:
            check()
        except (ValueError, KernelError) as error:
            parser.error(report.to_ascii(f"{what}: {error}"))
    if not in_notebook():
        sys.excepthook = _leave
    if flags.notebook:
        notebook.write(sys.argv[0], flags.notebook)
        report.console().print(f" written: {flags.notebook}")
        raise SystemExit
    given = {flag: value for flag, value in vars(flags).items() if flag in values and value != values[flag]}
    return Lesson(name, flags, given, sizes, extra)


def in_notebook():
    """Whether the command line belongs to a notebook's kernel, and not to the lesson."""
    return bool(re.search("ipykernel|colab_kernel", sys.argv[0] if sys.argv else ""))


def _parser(name, values, stage, direction, predict_only, meanings, extra):
    parser = argparse.ArgumentParser(description=report.to_ascii(f"Lesson {name}."))
    if not stage:
        blocks = whole_number(1, THREADS), "B", "threads per block"
    elif direction == "split":
        blocks = whole_number(1), "BC", "Bc, the keys per tile, and threads per block"
    elif TILINGS["forward"][stage].square:
        threads = "predicted only" if predict_only else "T x T threads per block"
        blocks = whole_number(1), "T", f"T, the side of a tile of {stage}: {threads}"
    else:
        only = ": predicted only" if predict_only else ""
        blocks = tile_sides, "BR,BC", f"Br queries by Bc keys per tile; one number for both{only}"
    for flag, (kind, sign, meaning) in {
        "n": (whole_number(1), "N", "N, the number of queries and of keys"),
        "d": (whole_number(1, MAX_D), "D", "d, the number of columns of a head"),
        "heads": (whole_number(1, GRID_YZ), "H", "the number of heads"),
        "blocks": blocks,
        "seed": (whole_number(0, 2**64 - 1), "S", "seed of the random input and of the questions"),
        **{flag: rest for flag, (_, *rest) in extra.items()},
    }.items():
        default = values[flag]
        help = f"{meanings.get(flag, meaning)} (default: {'what fits' if default is None else _written(default)})"
        how = {"action": "store_true"} if default is False else {"type": kind, "default": default, "metavar": sign}
        parser.add_argument(f"--{flag}", help=meaning if default is False else help, **how)
    chosen = "where kernels run (default: the GPU if there is one, else cpu)"
    parser.add_argument("--device", choices=("cpu", "gpu", "sim"), help=chosen)
    parser.add_argument("--step", action="store_true", help="wait for Enter between the parts and before answers")
    pictures = "write the output for slides: x.svg gives x-1.svg and so on, one per part; x.html gives a page"
    parser.add_argument("--svg", metavar="FILE", help=pictures)
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    kept = "add this run's questions and your answers to FILE (JSON); without a terminal, the questions and their key"
    parser.add_argument("--answers", metavar="FILE", help=kept)
    what = "write the lesson as a Jupyter notebook (.ipynb) instead of running it"
    parser.add_argument("--notebook", metavar="FILE", help=what)
    return parser


def whole_number(least, most=None):
    """The argparse type of an integer from `least` to `most`, or without an end."""

    def whole(text):
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least or (most and number > most):
            reach = f"from {least:,} to {most:,}" if most else f"of {least} or more"
            raise argparse.ArgumentTypeError(f"{text!r} is not valid: give a whole number {reach}")
        return number

    return whole


def tile_sides(text):
    """The argparse type of Br,Bc -> (Br, Bc); one number stands for both."""
    sides = tuple(map(whole_number(1), text.split(",")))
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: give Br,Bc or one number for both")
    return sides * (3 - len(sides))


def _given(value):
    """What follows the name of a flag that is given, nothing where it has no value."""
    return "" if value is True else f"{' ='[isinstance(value, tuple)]}{_written(value)}"


def _written(value):
    """The value of a flag as it is typed: a tuple with commas."""
    return ",".join(f"{part:.15g}" for part in value) if isinstance(value, tuple) else f"{value}"


def check_writable(path, suffixes=None):
    """Find out before the run whether `path` can be written, as numba_flash.files does. ValueError where it cannot."""
    if path is None:
        return
    file = Path(path)
    if suffixes and file.suffix.lower() not in suffixes:
        raise ValueError(f"{path!r} will not do: end it in {' or '.join(suffixes)}")
    if path == "-":
        raise ValueError("'-' is no name of a file, and here nothing is written to standard output")
    what = repr(path)
    try:
        there = file.exists()
        file.open("a").close()
        if not there:
            file.unlink()
        elif file.is_file():  # what is written is put in its place
            what = f"the folder of {path!r}"
            tempfile.TemporaryFile(dir=file.resolve().parent).close()
    except FileNotFoundError:
        raise ValueError(f"the folder of {path!r} does not exist: create it first, or name another") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise ValueError(f"{what} cannot be written ({why}): name another file") from None


def check_alone(flags, name, others):
    """ValueError where the flag `name`, which runs nothing, is given with one of `others`, which write of a run."""
    if getattr(flags, name) and (given := [other for other in others if getattr(flags, other)]):
        raise ValueError(f"nothing is run, so that there is nothing for --{given[0]} to write: leave one of them out")


def check_distinct(**files):
    """ValueError where two flags, by their names, are given the same file: one would overwrite the other."""
    there = [(name, Path(path).resolve()) for name, path in files.items() if path not in (None, "-")]
    for (one, path), (other, same) in combinations(there, 2):
        if path == same:
            raise ValueError(f"--{one} and --{other} are the same file, {files[other]!r}: name two")


def refuse_measuring(flags):
    """ValueError where --measure cannot be: without a GPU, or without ncu."""
    for place in (flags.device, None):  # what `figures` measures is where device() says
        profiler.refuse(on=place)


def check_answers(path):
    """Find out before the run whether answers can be added to `path`. ValueError where they cannot."""
    check_writable(path)
    if path is None:
        return
    questions.earlier(path)
    try:
        with questions.locked(Path(path).resolve()):
            pass
    except OSError as error:
        raise ValueError(f"{path!r}: its folder cannot be written to ({error.strerror}): name another file") from None


class Lesson:
    """One run of a lesson. Its flags are attributes: `n`, `d`, `heads`, `blocks`, `seed`, `device`, `step`, `svg`."""

    def __init__(self, name, flags, given, sizes, extra):
        self.__dict__.update(vars(flags))
        self.given = given  # the flags that differ from what the lesson sets
        self.screen = report.console()
        self.pages = {}  # of --svg: name -> what is on it
        used = {flag: getattr(flags, flag) for flag in ("n", "d", "heads", "blocks", "seed", *extra)}
        self.figures = {"lesson": name[:2], **used}
        self.figures |= {"device": device(self.device).name, "bills": {}, "errors": {}, "faults": []}
        self.parts = 0
        self.dice = random.Random(f"lesson {name[:2]}, seed {self.seed}")  # of the questions
        self.run = {"lesson": name[:2], "seed": self.seed, "questions": []}
        self.kept = None  # what the file of --answers has of this run
        self.alone = not (is_terminal(sys.stdin) and is_terminal(sys.stdout)) or in_notebook()  # nobody answers
        self.explained = False  # whether a bill has said what it counts
        heads = plural(self.heads, "head")
        threads = plural(self.blocks, "thread") if isinstance(self.blocks, int) else ""
        sizes = sizes.format(n=f"{self.n:,}", d=self.d, heads=heads, blocks=self.blocks, threads=threads)
        self.heading = report.heading(f"Lesson {name}", sizes)
        self.show(self.heading, "")

    # --- what is printed

    def show(self, *renderables):
        """Print strings, and what `report` makes."""
        for renderable in renderables:
            self.screen.print(renderable)
        if self.pages:
            list(self.pages.values())[-1].append(renderables)

    def text(self, paragraphs):
        """Print prose; indented lines stay as they are."""
        self.show(report.prose(paragraphs))

    def part(self, title):
        """Begin a part; with --step, first wait for Enter."""
        if self.parts:
            self.pause()
        self.parts += 1
        self.pages[f"{self.parts}"] = []
        self.show(report.heading(f"{self.parts}. {title}"), "")

    def pause(self):
        """With --step, wait for Enter where there is somebody to press it."""
        if self.step and not self.alone:
            self._read(PROMPT)
            print()

    def _read(self, prompt):
        """What is typed, without the space around it. Ctrl-D: nothing, and nothing is waited for any more."""
        try:
            return input(prompt).strip()
        except EOFError:
            self.alone = True
            print()
            return ""

    def draw(self, **sizes):
        """Sizes for questions, by the seed: each is one of the values given -> a namespace."""
        return SimpleNamespace(**{name: self.dice.choice(values) for name, values in sizes.items()})

    def ask(self, text, *asked):
        """Put a question, and `asked`, Questions for one number each; then a line, below which the answer comes.

        On a terminal each number is asked for and judged. Otherwise it stands below the line.
        """
        first, told = not self.run["questions"], []
        if text:
            self.text(text)
        for question in asked:
            self.run["questions"].append({})
            label = len(self.run["questions"])
            self.text(f"Question {label}. {question}")
            if not self.alone:
                if first:
                    self.text(HOW_TO_ANSWER)
                self._put(question)
                first = False
            if not question.asked:
                told.append(f"Answer {label}: {question.shown}. {question.how}")
            self.run["questions"][-1] = question.kept()
            if self.answers:
                self.kept = questions.keep(self.answers, self.run, self.kept)
        if told or not asked:
            how = " (On a terminal the lesson asks for it.)" if first and asked else ""
            self.text(f"Write your answer down before you read on.{how}")
            self.pause()
        self.pages[f"{self.parts}-answer"] = []
        if text or told:  # else the numbers were all there was to answer
            self.show(f" {'─' * 24} the answer {'─' * 24}", "")
        for answer in told:
            self.text(answer)

    def _put(self, question):
        """Ask until the answer is right, the tries are used up or the student goes on; say what was wrong."""
        while len(question.given) < questions.TRIES and not question.correct:
            typed = self._read(ANSWER)
            question.asked = question.asked or not self.alone
            print()
            if not typed:
                break
            try:
                says = question.help() if typed.startswith("?") else question.judge(typed)[1]
            except ValueError as error:
                says = str(error)
            self.text(says)
        if question.asked and not question.correct:
            self.text(f"The answer is {question.shown}. {question.how}")

    def running(self, what):
        """Say what runs now: it may take seconds."""
        self.screen.print(f" Running {what} ...\n")

    def source(self, kernel, first=None, last=None):
        """Print a function's source with line numbers: all, or from the line with `first` to that with `last`."""
        lines, number = inspect.getsourcelines(function_of(kernel) or kernel)
        begin = next((at for at, line in enumerate(lines) if first and first in line), 0)
        end = next((at for at, line in enumerate(lines) if last and last in line), len(lines) - 1)
        lines = textwrap.dedent("".join(lines[begin : end + 1])).splitlines()
        clean = report.to_ascii if self.screen.options.ascii_only else str
        self.show(*report.source_lines(list(map(clean, lines)), number + begin, self.screen.width), "")

    def bill(self, name, counted, *, predicted, **how):
        """Print a counted bill beside its prediction and keep both; `how` goes to `report.bill_table`.

        The ledger's convention stands under the first bill of the lesson.
        """
        self.keep_bill(name, counted, predicted)
        self.show(report.bill_table(counted, predicted=predicted, convention=not self.explained, **how), "")
        self.explained = True

    def counts(self, name, counted, *, predicted):
        """Print a small bill without the ledger's convention below it, and keep it."""
        self.keep_bill(name, counted, predicted)
        both = predicted, counted
        rows = [
            [f"{tensor} {kind}", *(getattr(bill.kernels[kernel].get(tensor, Count()), kind) for bill in both)]
            for kernel, tensors in counted.kernels.items() for tensor in tensors for kind in KINDS
        ]  # fmt: skip
        rows = [[*row, row[2] - row[1]] for row in rows if any(row[1:])]
        self.show(report.table([name, "predicted", "counted", "difference"], rows), "")

    def keep_bill(self, name, counted, predicted):
        both = {"predicted": predicted, "counted": counted}
        self.figures["bills"][name] = {kind: json.loads(bill.to_json()) for kind, bill in both.items()}

    def fault(self, error):
        """Print what the engine says a kernel did wrong, and the line it happened in, as something that was to come."""
        where = {name: getattr(error, name) for name in ("line", "block", "thread", "tensor")}
        self.figures["faults"].append({"kind": type(error).__name__, **where})
        file = Path(error.file).name.strip("<>")
        said = str(error).replace(f"{error.file}, line {error.line}", f"line {error.line} of {file}")
        said = f"{type(error).__name__}: {said.replace(error.file, file)}."
        self.text("The engine stops it, as intended here, and says:")
        self.text("\n".join(f"    {line}" for line in textwrap.wrap(said, self.screen.width - 6)))
        line = f"     line {error.line}:  "
        code = linecache.getline(error.file, error.line).strip()
        self.show(line + report.cut(code, self.screen.width - len(line) - 1), "")

    def tries(self, flags):
        """Print commands to try: `flags` maps the flags of a run to what it will show. Flags in use stay in use."""
        for more, what in flags.items():
            kept = {flag: value for flag, value in self.given.items() if not re.search(f"--{flag}[ =]", more)}
            kept = "".join(f" --{flag}{_given(value)}" for flag, value in kept.items())
            command = _folded(f"{self.command()}{kept} {more}", self.screen.width)
            self.text(f"{command}\n{' '.join(what.split())}")

    def command(self):
        """What starts this lesson from the folder where the learner stands."""
        script, package = Path(sys.argv[0]).resolve(), Path(__file__).parent
        if script.suffix == ".py" and script.is_relative_to(Path.cwd()) and not script.is_relative_to(package):
            return f"python {script.relative_to(Path.cwd()).as_posix()}"
        return f"python -m numba_flash lessons {self.figures['lesson']}"

    # --- what is computed

    @cached_property
    def inputs(self):
        """Random q, k and v, (heads, N, d), float32."""
        shape = (self.heads, self.n, self.d)
        return testing.inputs(shape, shape, seed=self.seed)

    @cached_property
    def reference(self):
        """The output in float64."""
        out = np.empty(self.inputs[0].shape)
        for place, part in self._parts_of_input():
            out[place] = reference.attention(*part)[0]
        return out

    def _parts_of_input(self):
        """Some rows of q with the k and v of their head: what float64 NumPy can take without S as a whole."""
        q, k, v = self.inputs
        for h in range(self.heads):
            for i in range(0, self.n, ROWS):
                place = h, slice(i, i + ROWS)
                yield place, (q[place], k[h], v[h])

    def exact(self, stage, out, naive=None):
        """How far `out` is from float64 -> report.error_line.

        naive: the output of the stage `naive`, which is the yardstick; without it, the worst case of rounding is.
        """
        error = self._error(stage, out)
        if naive is None:
            return report.error_line(error, bound=max(testing.naive_bound(*part) for _, part in self._parts_of_input()))
        yardstick = self._error("naive", naive)
        return report.error_line(error, naive=yardstick, bound=testing.bound(self.reference, yardstick, n_k=self.n))

    @cached_property
    def dout(self):
        """A random gradient of the output, shaped like q."""
        q = self.inputs[0]
        return np.random.default_rng(self.seed + 1).standard_normal(q.shape, q.dtype)

    @cached_property
    def gradients(self):
        """dq, dk and dv in float64, and their bounds by the rounding of terms alone, over all heads."""
        heads = [(*(x[h] for x in self.inputs), self.dout[h]) for h in range(self.heads)]
        truth = [reference.attention_backward(*head) for head in heads]
        bounds = [testing.gradient_bounds(*head) for head in heads]
        largest = {name: max(bound[name] for bound in bounds) for name in bounds[0]}
        return [np.stack(parts) for parts in zip(*truth, strict=True)], largest

    def exact_gradients(self, stage, got, naive):
        """How far (dq, dk, dv) are from float64 -> report.gradient_error_lines. naive: those of the stage `naive`."""
        truth, bounds = self.gradients
        lines = {}
        for (name, bound), x, own, expected in zip(bounds.items(), got, naive, truth, strict=True):
            error, yardstick = (float(np.abs(y - expected).max()) for y in (x, own))
            self.figures["errors"][f"{stage}, {name}"] = error
            lines[name] = error, yardstick, bound + 2 * yardstick
        return report.gradient_error_lines(lines)

    def _error(self, stage, out):
        error = self.figures["errors"][stage] = float(np.abs(out - self.reference).max())
        return error

    def end(self):
        """Name the exercises, and write what --json and --svg asked for."""
        names = [exercise.name for exercise in EXERCISES.values() if exercise.lesson == self.run["lesson"]]
        one = len(names) == 1
        what, them, of_one = ("Exercise", "it", "its hole") if one else ("Exercises", "them", "the hole of one")
        if names:
            self.text(f"""
            {what}: {", ".join(names)}. Copy {them}, fill {of_one}, and have it judged:

                python -m numba_flash check --copy work
                python -m numba_flash check work/{names[0]}.py
            """)
        if self.json:
            write_text(self.json, json.dumps(self.figures, indent=1) + "\n")
        pictures = (
            picture.save(self.heading, self.pages, self.svg, f"numba_flash, lesson {self.run['lesson']}")
            if self.svg
            else []
        )
        pictures = " to ".join(dict.fromkeys([*pictures[:1], *pictures[-1:]]))
        for file in filter(None, (self.json, self.answers, pictures)):
            self.screen.print(f" written: {file}")


def plural(number, noun):
    """A number and what it counts: 1 head, 3 heads."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def line_of(kernel, text, which=1):
    """The number of the `which`-th line of a kernel that holds `text`. ValueError where there is no such line."""
    function = function_of(kernel)
    lines, number = inspect.getsourcelines(function)
    places = [at for at, line in enumerate(lines, number) if text in line]
    if len(places) < which:
        raise ValueError(f"text={text!r} is in {len(places)} lines of {function.__name__}: there is no number {which}")
    return places[which - 1]


def without(kernel, text, which=1):
    """The same kernel without the `which`-th line that holds `text`; the other lines keep their numbers.

    Of an `if` or a loop its body remains. Raises ValueError where there is no such line.
    """
    removed = line_of(kernel, text, which)
    function = function_of(kernel)
    lines, number = inspect.getsourcelines(function)
    at = removed - number
    opens_block = re.search(r":\s*(#.*)?$", lines[at])
    lines[at] = re.sub(r"\S.*", "if True:" if opens_block else "pass", lines[at])
    source = "\n" * (number - 1) + textwrap.dedent("".join(lines))
    file = f"<{Path(function.__code__.co_filename).name} with line {removed} removed>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals, "__name__": __name__}
    exec(compile(source, file, "exec"), names)
    return names[function.__name__]


def _folded(command, width):
    """A command, indented; where it is too long for a line, a backslash ends the line and it goes on in the next."""
    if len(command) <= width - 5:
        return f"    {command}"
    lines = textwrap.wrap(command, width - 8, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "    " + " \\\n    ".join(lines)


def roofline(bandwidth, roofs, points, width=report.WIDTH):
    """A roofline chart in log-log scale -> lines of text, at most `width` columns wide.

    bandwidth: bytes per second. roofs: name -> operations per second. points: one-character mark -> operations per
    byte; each stands on the line that bounds it, as fast as memory or the highest roof lets it be, and where two share
    a place the larger one to the right.
    """
    top, named = max(roofs.values()), max(map(len, roofs))
    low = math.floor(math.log2(min(points.values()))) - 1
    high = math.ceil(math.log2(max(*points.values(), top / bandwidth))) + 1
    step = max(1, min(4, (width - named - 8) // (high - low)))  # columns per doubling; a line per doubling

    def place(intensity, roof):
        return round(math.log2(top / min(roof, bandwidth * intensity))), round((math.log2(intensity) - low) * step)

    cells = {}
    for roof in sorted(roofs.values()):
        row, ridge = place(roof / bandwidth, roof)
        cells |= {(row, column): "─" for column in range(ridge, (high - low) * step + 1)}
    for power in range(low, high + 1):
        if bandwidth * 2**power < top:
            cells[place(2**power, top)] = "/"
    for mark, intensity in sorted(points.items(), key=lambda point: point[1]):
        row, column = place(intensity, top)
        while cells.get((row, column), "/") not in "/─":
            column += 1
        cells[row, column] = mark
    names = {place(roof, roof)[0]: name for name, roof in roofs.items()}
    width = (high - low) * step + 1
    for row in range(max(row for row, _ in cells) + 1):
        yield f" {names.get(row, ''):>{named}} │" + "".join(cells.get((row, c), " ") for c in range(width)).rstrip()
    yield f" {'':>{named}} ─" + "─" * width
    ticks = [" "] * (width + 4)
    for power in range(low + low % 2, high + 1, 2):
        label = f"{2**power}" if power >= 0 else f"1/{2**-power}"
        ticks[(power - low) * step : (power - low) * step + len(label)] = label
    yield f" {'':>{named}}  " + "".join(ticks).rstrip()


def is_terminal(stream):
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # None or closed
        return False


def _leave(kind, error, trace):
    """The last word: a line for Ctrl-C and for errors of numba_flash, the traceback for a slip in the script itself."""
    if issubclass(kind, BrokenPipeError):  # piped to head: nobody listens any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1)
    if issubclass(kind, KeyboardInterrupt):
        print("\nstopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    script = frames[0][0] if frames else ""
    own = max((at for at, (file, _) in enumerate(frames) if file == script), default=0)
    called = any(Path(file).is_relative_to(Path(__file__).parent) for file, _ in frames[own + 1 :])
    if called and issubclass(kind, (ValueError, TypeError, KernelError, MemoryError, OSError)):
        line = f"{Path(script).name}, line {frames[own][1]}: {error}"
        report.console(sys.stderr).print(line, soft_wrap=True)
        raise SystemExit(1)
    sys.__excepthook__(kind, error, trace)
