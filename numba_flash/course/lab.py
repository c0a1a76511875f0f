"""`python -m numba_flash lab`: one fault in a stage, and what it does; find its line, or write a test that finds it."""

import ast
import linecache
import math
import random
import re
import sys
import textwrap

from .. import lesson, output, report
from ..errors import BarrierDivergence, OutOfBounds, RaceDetected, UninitializedRead
from ..hbm.lines import lines as count_lines
from ..stages import LADDER
from . import score
from .faults import MUTANTS
from .symptoms import INPUTS, TILES, Right, examine, inputs_of, installed, plant, run

LEVELS = "easy", "hard"
SIDE = 8  # of the tiles that the pictures show
SHOWN = 30  # lines of source, at least
ASKED = "Which line? (?: a hint   Ctrl-D: leave)"


def add_command(command):
    sub = command("lab", lab, "find the fault that somebody put into a kernel, or write a test that does")
    whole = lesson.whole_number
    sub.add_argument("--stage", choices=LADDER, metavar="STAGE", help=f"{', '.join(LADDER)} (default: any)")
    what = "which fault: another number, another fault (default: %(default)s)"
    sub.add_argument("--seed", type=whole(0), default=1, metavar="S", help=what)
    what = "easy: what lessons 00 to 05 teach; hard: to 09, masks, dropout, both passes, the whole file (default: easy)"
    sub.add_argument("--level", choices=LEVELS, default="easy", help=what)
    sub.add_argument("--line", type=whole(1), metavar="N", help="your answer, where there is no terminal to type it")
    sub.add_argument("--solution", action="store_true", help="show the fault")
    what = "score a test of yours, a file with test(attention) or test_backward(attention_backward), on faulty kernels"
    sub.add_argument("--test", metavar="FILE", help=what)
    sub.add_argument("--all", action="store_true", help=f"with --test: all faults of the level, not {score.SOME}")
    output.add_json(sub, "the result", "text")


def lab(flags):
    screen = report.console(None if flags.json != "-" else sys.stderr)
    if flags.test:
        if flags.line or flags.solution:
            raise ValueError(f"--{'line' if flags.line else 'solution'} does not go with --test: leave one out")
        status, result, page = score.run(
            flags.test, stage=flags.stage, seed=flags.seed, level=flags.level, everything=flags.all
        )
        if flags.json != "-":
            for part in page:
                screen.print(part)
    else:
        if flags.all:
            raise ValueError("--all is for --test FILE: add it, or leave --all out")
        status, result = game(Case(flags.seed, flags.stage, flags.level), flags, screen)
    output.write(result, flags.json)
    return status


def pool(stage=None, level="hard"):
    """The faults that may be drawn: those in a stage's file that show; easy: by what lessons 00 to 05 teach."""
    mutants = [m for m in MUTANTS if m.file.startswith("stages/") and m.fault.shown_by]
    if level == "easy":
        mutants = [m for m in mutants if m.direction == "forward" and m.fault.shown_by in score.EASY]
    return [m for m in mutants if stage in (None, m.stage)]


def draw(seed, stage=None, level="easy"):
    """The fault of a seed: consecutive seeds draw each fault once before one comes again."""
    drawn = pool(stage, level)
    return random.Random(len(drawn)).sample(drawn, len(drawn))[seed % len(drawn)]


class Case:
    """One fault, drawn by a seed, and what it does."""

    def __init__(self, seed, stage=None, level="easy"):
        self.seed, self.asked, self.level = seed, stage, level
        self.mutant = draw(seed, stage, level)
        self.planted = plant(self.mutant)
        self.file = self.mutant.file.rpartition("/")[2]
        self.names = inputs_of(self.mutant.direction, level == "easy")

    def examine(self):
        with report.progress(f"running {self.mutant.stage} with the fault", len(self.names) + 2) as advance:
            self.symptoms = examine(self.mutant, self.planted.source, self.names, advance)
        return self.symptoms

    @property
    def functions(self):
        """(name, first line, last line) of the functions that are shown: all, or in an easy case that with the fault,
        and with a short one its neighbours."""
        found = [node for node in ast.parse(self.planted.source).body if isinstance(node, ast.FunctionDef)]
        begin = [min([node.lineno, *(d.lineno for d in node.decorator_list)]) for node in found]
        ranges = [(node.name, first, node.end_lineno) for node, first in zip(found, begin, strict=True)]
        if self.level == "easy":
            low = next(at for at, (_, first, last) in enumerate(ranges) if first <= self.planted.lines[0] <= last)
            high = low + 1
            while sum(last - first + 1 for _, first, last in ranges[low:high]) < SHOWN and high - low < len(ranges):
                low, high = (low, high + 1) if high < len(ranges) else (low - 1, high)
            ranges = ranges[low:high]
        return ranges

    def command(self):
        asked = f" --stage {self.asked}" if self.asked else ""
        level = f" --level {self.level}" if self.level != "easy" else ""
        return f"python -m numba_flash lab --seed {self.seed}{asked}{level}"

    def right(self, line):
        """Whether it is a line with the fault, or of a gap: from the line before it to the line after."""
        planted = self.planted
        if not planted.missing:
            return line in planted.lines
        return any(gap and gap[0] <= line <= gap[-1] for gap in (planted.lines, planted.head))

    def check(self, line):
        if not any(first <= line <= last for _, first, last in self.functions):
            shown = ", ".join(f"{first} to {last}" for _, first, last in self.functions)
            raise ValueError(f"line={line} is not in the listing, which has the lines {shown}")


# --- the game ---------------------------------------------------------------------------------------------------------


def game(case, flags, screen):
    """Show the case, take answers -> (exit status, what --json writes)."""
    if flags.line:
        case.check(flags.line)
    case.examine()
    result = {"seed": case.seed, "stage": case.mutant.stage, "direction": case.mutant.direction, "level": case.level}
    result["symptoms"] = as_json(case.symptoms)
    quiet, tries = flags.json == "-", []

    def say(*parts):
        for part in parts if not quiet else ():
            screen.print(part)

    answered = False
    if not flags.line and not flags.solution:
        say(*page(case))
    if flags.line:
        tries, answered = [flags.line], case.right(flags.line)
    elif not flags.solution and not quiet and all(map(lesson.is_terminal, (sys.stdin, sys.stdout))):
        tries, answered = ask(case, say)
    if answered or flags.solution or (tries and tries[-1] == "?"):
        say(*explanation(case, answered))
        result |= {"line": list(case.planted.lines), "fault": case.mutant.fault.name}
        result["stands_for"] = case.mutant.fault.stands_for
    elif flags.line:
        result["hint"] = f"Not that line. {nudge(case, 0)}"
        say(report.prose(result["hint"]))
    else:
        say(how_to_answer(case))
    tries = [line for line in tries if line != "?"]
    result |= {"tries": tries, "found": answered}
    return (1 if flags.line and not answered else 0), result


def ask(case, say):
    """Take line numbers from the terminal -> (tries, whether the last is right). Each ? says more, the last one all;
    Ctrl-D leaves."""
    tries, hints = [], 0
    while True:
        try:
            answer = input(f" {ASKED} ").strip()
        except EOFError:
            print()
            return tries, False
        if answer == "?":
            if hints == most_hints(case):
                return [*tries, "?"], False
            say(report.prose(nudge(case, hints)))
            hints += 1
            continue
        if not answer:
            say(report.prose("Type the number of a line, or ? for a hint; Ctrl-D leaves."))
            continue
        try:
            line = int(answer)
            case.check(line)
        except ValueError as error:
            text = str(error) if answer.isdecimal() else f"{answer!r} is no line number: type one, or ?"
            say(report.prose(text))
            continue
        tries.append(line)
        if case.right(line):
            return tries, True
        say(report.prose(f"Not that line. {nudge(case, hints)}"))
        hints = min(hints + 1, most_hints(case))


def page(case):
    """The case: what the kernel does, and its source."""
    mutant, symptoms = case.mutant, case.symptoms
    passes = {"forward": "forward pass", "backward": "backward pass", "atomic": "backward pass with atomics",
              "split": "keys split among blocks"}  # fmt: skip
    yield report.heading(f"Lab, seed {case.seed}: {mutant.stage}", f"{passes[mutant.direction]}, level {case.level}")
    yield ""
    tiles = TILES[mutant.stage]
    tiles = f"tiles of {tiles[0]} × {tiles[1]}" if isinstance(tiles, tuple) else f"tiles of {tiles} × {tiles}"
    tiles = tiles if TILES[mutant.stage] else "no tiles"
    yield report.prose(f"""
    Somebody made one mistake in {case.file}: a line is wrong, or missing. Below is what the kernels do now (on the
    CPU engine, {tiles}), and then the source. Which line is it?
    """)
    parts = [("Results against float64", against_float64(case))]
    if placed := next((finding for finding in symptoms.findings if finding.first), None):
        parts.append(("Where the first of them is wrong", where(placed)))
    parts += [("Other checks", other_checks(case)), ("The source", listing(case))]
    for number, (title, lines) in enumerate(parts, 1):
        yield report.heading(f"{number}. {title}")
        yield ""
        yield from lines


def against_float64(case):
    yield results(case.symptoms)
    yield ""
    what = "out is O. lse is what lesson 05 calls L: m + log l, the logarithm of each row's sum of exp(S)."
    if case.mutant.direction in ("backward", "atomic"):
        what = "dq, dk and dv are the gradients (lesson 07)."
    yield report.prose(f"{what} What is not marked WRONG is as exact as rounding allows.")
    if stopped := next((finding for finding in case.symptoms.findings if finding.raised), None):
        yield report.prose(f"With the input “{INPUTS[stopped.name].what}” the engine stops and says:")
        yield from quoted(case, stopped.raised)


def other_checks(case):
    yield report.table(["check", "what it says"], list(checks(case.symptoms)))
    yield ""
    for finding in case.symptoms.billed[:1]:
        yield report.prose(f"The bill with the input “{INPUTS[finding.name].what}”, counted against predicted:")
        yield from (f"     {line}" for line in finding.diff[:4])
        if len(finding.diff) > 4:
            yield f"     and {lesson.plural(len(finding.diff) - 4, 'line')} more"
        yield ""
    if case.symptoms.strict:
        name, said = case.symptoms.strict
        yield report.prose(f"Strict mode (lesson 00), with the input “{INPUTS[name].what}”:")
        yield from quoted(case, said)


def results(symptoms):
    names = next((list(f.errors) for f in symptoms.findings if f.errors), ["result"])
    rows = []
    for finding in symptoms.findings:
        cells = ["stopped"] + ["-"] * (len(names) - 1) if finding.raised else []
        for name in names if not finding.raised else ():
            off, _ = finding.errors[name]
            wrong = finding.wrong[name].any()
            cells.append((f"{off:.1e}" if off == off else "NaN") + (" WRONG" if wrong else ""))
        rows.append([INPUTS[finding.name].what, *cells])
    return report.table(["largest error with the input", *names], rows)


def quoted(case, error):
    """What the engine says, indented, with the line it names."""
    said = str(error).replace("<lab>/", "")
    said = said.replace(f"{case.file}, line", "line")
    said = f"{type(error).__name__}: {said}"
    yield from (f"     {line}" for line in textwrap.wrap(said, report.WIDTH - 6))
    if line := getattr(error, "line", None):
        yield f"     line {line}:  {report.cut(linecache.getline(error.file, line).strip(), report.WIDTH - 20)}"
    yield ""


def where(finding):
    """Maps of the wrong elements of one input, and the first of them."""
    what, index, got, expected = finding.first
    one = INPUTS[finding.name]
    maps = []
    for name, wrong in finding.wrong.items():
        if not wrong.any():
            continue
        matrices = wrong.reshape(wrong.shape[0] * wrong.shape[1], *(wrong.shape[2:] if wrong.ndim == 4 else (-1, 1)))
        head = next(at for at, matrix in enumerate(matrices) if matrix.any())
        matrix = matrices[head]
        lit = {(int(i) // SIDE, int(t) // SIDE) for i, t in zip(*matrix.nonzero(), strict=True)}
        sizes = [-(-size // SIDE) for size in matrix.shape]
        of = f", head {head}" if len(matrices) > 1 else ""
        rows = spans(sorted(set(matrix.nonzero()[0])))
        maps.append(report.Tiles(f"{name}{of}", *sizes, lit, f"{matrix.sum():,} of {matrix.size:,} wrong: rows {rows}"))
    yield report.prose(f"With the input “{one.what}”; a cell is {SIDE} × {SIDE} elements, lit where one is wrong:")
    yield report.tile_map(*maps)
    yield ""
    at, axes = ", ".join(map(str, index)), ", ".join(("batch", "head", "row", "column")[: len(index)])
    yield report.prose(f"The first: {what}[{at}] is {got:.6g}, expected {expected:.6g} ({axes}).")


def spans(numbers):
    """Row numbers in short: 0–7, 32–36."""
    parts, numbers = [], [int(n) for n in numbers]
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    text = [f"{a}" if a == b else f"{a}–{b}" for a, b in parts]
    return ", ".join(text[:4]) + (", …" if len(text) > 4 else "")


def checks(symptoms):
    ended = any(not finding.raised for finding in symptoms.findings)
    bill = f"differs with {lesson.plural(len(symptoms.billed), 'input')}, see below" if symptoms.billed else (
        "is what was predicted, with every input" if ended else "nothing was counted: no run came to its end"
    )  # fmt: skip
    yield ["the HBM bill", bill]
    yield [
        "strict mode",
        f"{type(symptoms.strict[1]).__name__}, see below" if symptoms.strict else "finds nothing more",
    ]
    same = {True: "the same result, bit by bit", False: "another result", None: "nothing to compare: the runs stop"}
    yield ["threads in another order", same[symptoms.orders]]
    loose = "passes, and does not see the fault" if symptoms.loose else "fails"
    yield ["np.allclose(atol=1e-2)", f"{loose} (one head of random numbers, N = 64, d = 16)"]


def listing(case):
    source = case.planted.source.splitlines()
    clean = report.to_ascii if report.console().options.ascii_only else str
    for _, first, last in case.functions:
        text = textwrap.dedent("\n".join(source[first - 1 : last])).splitlines()
        yield from report.source_lines(list(map(clean, text)), first, report.console().width)
        yield ""
    shown = "\n".join("\n".join(source[first - 1 : last]) for _, first, last in case.functions)
    if named := [word for word in ("uncoalesced", "bank conflicts") if word in shown]:
        yield report.prose(f"What is called {' or '.join(named)} costs time, and changes no result: lesson 12.")


def how_to_answer(case):
    return report.prose(f"""
    Answer with the number of the wrong line. Where a line is missing, the line before or after the gap will do:

        {case.command()} --line NUMBER

    `--solution` shows the fault, and `--seed {case.seed + 1}` is the next case.
    """)


def explanation(case, answered):
    planted, fault, symptoms = case.planted, case.mutant.fault, case.symptoms
    source = planted.source.splitlines()
    lines = planted.lines
    yield ""
    if planted.missing:
        head = f"{'a line is' if len(planted.before) == 1 else 'lines are'} missing between {lines[0]} and {lines[1]}."
        if planted.head:
            head += " (At the head of the loop, between {} and {}, it would do the same.)".format(*planted.head)
        shown = [("missing", line) for line in planted.before]
    else:
        head = f"line {' and '.join(map(str, lines))}."
        shown = [("it says", source[line - 1]) for line in lines]
        shown += [("it should say", line) for line in planted.before or ("nothing",)]
    yield report.prose(f"{'Right' if answered else 'The fault'}: {head}")
    yield from folded(shown)
    yield ""
    yield report.prose(f"What it stands for, in kernels that were published: {fault.stands_for}.")
    yield report.prose(f"What gives it away: {gives_away(case)}")
    if symptoms.loose:
        yield report.prose(
            "The usual test, np.allclose with atol=1e-2 on random numbers, passes in spite of it, in the same tiles."
        )
    yield report.prose(f"The next case: `python -m numba_flash lab --seed {case.seed + 1}`. Or write a test that finds "
                       "such faults: `python -m numba_flash lab --test FILE`.")  # fmt: skip


def folded(shown):
    for head, text in shown:
        code = re.sub(r"\s#.*", "", text).strip()
        first, *rest = textwrap.wrap(code, report.WIDTH - 21, break_long_words=False)
        yield f"     {head:<14} {first}"
        yield from (" " * 20 + more for more in rest)


def gives_away(case):
    symptoms, shown_by = case.symptoms, case.mutant.fault.shown_by
    if symptoms.strict and isinstance(symptoms.strict[1], RaceDetected):
        return race(case, symptoms.strict[1])
    if "bill" in shown_by:
        return "the results are right, and the bill alone shows it."
    if shown_by == "strict":
        return "the results happen to be right here, and strict mode alone shows it."
    if shown_by == "whole":
        exact = "a comparison with float64 that allows rounding and no more"
        tiles = "" if "short" in symptoms.kinds else ", on more than one tile"
        return f"{exact if symptoms.loose else 'any comparison with float64'}{tiles}."
    return f"it takes {INPUTS[shown_by].needs}."


def race(case, error):
    """What shows a race. compute-sanitizer's racecheck follows shared memory alone."""
    shared = re.search(rf"\b{error.tensor} = cuda\.shared\.array", case.planted.source)
    on_gpu = ", or on a GPU `compute-sanitizer --tool racecheck`" if shared else ""
    bill = ". Here the bill shows it as well" if case.symptoms.billed else ""
    here, there = (
        ("wrong", "right a thousand times") if case.symptoms.wrong else ("right", "wrong one time in a thousand")
    )
    return (
        f"it is a race, which strict mode finds{on_gpu}{bill}. A comparison with float64 is not enough: the CPU engine "
        f"runs one thread at a time, so that the results are {here} in every run, and on a GPU they may be {there}."
    )


# --- nudges -----------------------------------------------------------------------------------------------------------


def most_hints(case):
    """How many hints there are before ? shows the line."""
    return 3 if case.level == "hard" else 2


def nudge(case, number):
    """Hint `number`, from 0, each of which says more than the last; the last holds for all that follow."""
    first, last = case.planted.lines[0], case.planted.lines[-1]
    if number == 0:
        return hint(case)
    name, begin, end = next(one for one in case.functions if one[1] <= first <= one[2])
    if number == 1 and case.level == "hard":
        return f"The fault is in {name}."
    below, above = random.Random(case.seed).sample(range(2, 8), 2)
    low, high = max(first - below, begin), min(last + above, end)
    return f"The fault is in {name}, between the lines {low} and {high}. (? shows it.)"


TAIL = (
    "Whole tiles are right, and others are not: something is cut off at the last tile, or is not. Look at every //, "
    "every min(…), every range, guard and grid."
)


HINTS = {
    OutOfBounds: "An index ran over the end of {tensor} in line {line}: which guard, or which end of a loop, should "
                 "have kept that thread away from it?",
    BarrierDivergence: "Not every thread comes to the barrier in line {line}: what lets some of them leave before it?",
    RaceDetected: "Strict mode names two accesses to one element, and where no barrier parts them. Is a barrier "
                  "missing there, or do two threads use an element that one should have for itself?",
    UninitializedRead: "Line {line} reads memory that nobody has written. Who should have written it, and when does "
                       "that not happen?",
}  # fmt: skip


def hint(case):
    """What the symptoms say about the place."""
    symptoms = case.symptoms
    raised = next((f.raised for f in symptoms.findings if f.raised), None)
    for error in filter(None, (raised, symptoms.strict and symptoms.strict[1])):
        if type(error) in HINTS:
            return HINTS[type(error)].format(tensor=error.tensor, line=error.line)
    if not symptoms.wrong:
        return bill_hint(case)
    names = [finding.name for finding in symptoms.wrong]
    by_first = {
        "ragged": TAIL,
        "short": TAIL,
        "scale": "It goes wrong with another scale than 1/√d: look where `scale` enters.",
        "low": "It goes wrong where scores are far below 0: what does m hold before the first score, and after it?",
        "lowest": "It goes wrong where scores are below any number one would think of: what does m hold at the start?",
        "heads": "It goes wrong where heads of Q share a head of K and V: which one does head h use?",
        "causal": "It goes wrong with causal order alone: where does a position of a query become one of a key?",
        "early": "It goes wrong in rows that see no key: there l is 0, and m is −∞.",
        "keys": "It goes wrong with a key mask: whose mask is read, and what is stored where a key is hidden?",
        "hidden": "It goes wrong where a hidden key meets scores far below 0: which number stands for “hidden”?",
        "dropout": "It goes wrong with dropout alone: which numbers decide what is kept, and what is multiplied by it?",
        "alone": "It goes wrong where the pass has no out and lse to begin with: what does it form by itself?",
    }
    if "whole" not in names:
        return by_first[next(name for name in by_first if name in names)]
    again = "" if "short" in names else " One tile alone is right: what happens from one tile to the next?"
    bill = f" And the bill differs: {symptoms.billed[0].diff[0]}." if symptoms.billed else ""
    return product_hint(case) + again + bill


def product_hint(case):
    """Which of the results are wrong, and what that says."""
    symptoms = case.symptoms
    wrong = {what for finding in symptoms.wrong if finding.wrong for what, x in finding.wrong.items() if x.any()}
    if case.mutant.direction in ("forward", "split"):
        if wrong == {"lse"}:
            return "out is right, and lse is not: look at the line that forms L."
        if wrong == {"out"}:
            return "lse is right, and so are the scores: look at what comes after them, at P, V and O."
        return "lse is wrong as well as out: it goes wrong before the product with V, with the scores, m or l."
    gone = sorted(wrong)
    rest = [name for name in ("dq", "dk", "dv") if name not in wrong]
    if not rest:
        return "dq, dk and dv are all wrong: what do they have in common?"
    one = "is" if len(gone) == 1 else "are"
    return f"{' and '.join(gone)} {one} wrong, {' and '.join(rest)} right: what enters into the wrong alone?"


def bill_hint(case):
    """Which lines touch the tensor that the bill has too much of."""
    finding = case.symptoms.billed[0] if case.symptoms.billed else None
    if finding is None:
        return "The results are right, and so is the bill. What do the other checks say?"
    kernel, tensor, kind = re.match(r"(\w+): (\w+) (\w+)", finding.diff[0]).groups()
    mutant = case.mutant
    kept = Right(mutant.stage, mutant.direction).of(finding.name)[2]
    with installed(mutant, case.planted.source), count_lines() as counted:
        run(mutant.stage, mutant.direction, finding.name, kept)
    one = next(k for k in counted.kernels if k.name == kernel)
    places = []
    for function in one.functions:
        for line, tensors in sorted(one.at(function).items()):
            if tensor in tensors and (number := getattr(tensors[tensor], kind)):
                called = [f"{at}" for _, at in one.callers(function, tensor)] if function != one.functions[0] else []
                through = f"{function.name}, called in line {' and '.join(called)}" if called else f"line {line}"
                places.append(f"{through} ({number:,})")
    return (
        f"The results are right, and the bill is not: {tensor} has other {kind} than predicted, in {'; '.join(places)}."
    )


def as_json(symptoms):
    rows = {}
    for finding in symptoms.findings:
        rows[finding.name] = {
            "right": finding.right,
            "raised": finding.raised and type(finding.raised).__name__,
            "errors": {name: off if math.isfinite(off) else None for name, (off, _) in (finding.errors or {}).items()},
            "bill": finding.diff or [],
        }
    strict = symptoms.strict and type(symptoms.strict[1]).__name__
    return {"inputs": rows, "strict": strict, "orders_agree": symptoms.orders, "passes_allclose": symptoms.loose}
