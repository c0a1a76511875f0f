"""`python -m numba_flash check`: judges exercises, gives hints, grades a class."""

import ast
import os
import re
import sys
import time
import warnings
from itertools import islice
from pathlib import Path

from .. import lesson, output, report
from . import floats, sandbox
from .exercise import folder, hole, python_lines
from .exercises import EXERCISES
from .judge import CRITERIA

SECONDS = 30
HINTS = 3  # of each exercise
LARGEST = 10**6  # bytes of a file
MOST = 20_000  # files and folders under a folder of answers
LEFT_OUT = (
    "a folder called solutions holds no answers",
    "it is no file, or a link to none",
    "neither name nor first line is that of an exercise",
)
NOTES = 3  # on float64, at most
COMMAND = "python -m numba_flash check"
WORDS = {True: "yes", False: "NO", None: "not judged"}
SHORT = WORDS | {None: "–"}
LINE = 70  # columns of a line of a file in a message
PATH = 28  # columns of a path in a table of verdicts


def add_command(command):
    sub = command(
        "check", check, "judge exercises by their output, races, HBM bill and threads; without FILE, list them"
    )
    sub.add_argument("files", nargs="*", metavar="FILE", help="a file, the name of an exercise, or a folder of answers")
    number = lesson.whole_number
    sub.add_argument("--hint", type=number(1, HINTS), metavar="N", help="show hints 1 to N, and judge nothing")
    sub.add_argument("--solution", action="store_true", help="show a solution, and judge nothing")
    sub.add_argument("--copy", metavar="DIR", help="copy the exercises to DIR, or those named, and judge nothing")
    what = f"time for one file, after which it is stopped (default: {SECONDS})"
    sub.add_argument("--seconds", type=number(1, 3600), metavar="S", help=what)
    output.add_json(sub, "the verdicts, for grading,", "report")


def check(flags):
    screen = report.console()
    given = [n for n in ("copy", "hint", "solution", "seconds", "json") if getattr(flags, n) not in (None, False)]
    if given and (first := given[0]) in ("copy", "hint", "solution"):
        together = ("hint", "solution") if first != "copy" else ()
        if others := [name for name in given[1:] if name not in together]:
            raise ValueError(f"--{first} judges nothing, and does not go with --{others[0]}: leave one of them out")
    if flags.copy is not None:
        return copy(flags, screen)
    if not flags.files:
        if flags.seconds:
            raise ValueError(f"--seconds is for judging: name a file, {COMMAND} 00_guard --seconds {flags.seconds}")
        if flags.hint or flags.solution:
            raise ValueError(
                f"--{'hint' if flags.hint else 'solution'} needs the exercise: {COMMAND} 00_guard --hint 1"
            )
        return listing(flags, screen)
    files = [file for name in flags.files for file in found(name)]
    if flags.hint or flags.solution:
        for file in files:
            show_help(exercise_of(file), flags, screen)
        return 0
    verdicts = []
    with report.progress("checking", len(files), after=1) as advance:
        for file in files:
            verdicts.append(verdict_on(file, flags.seconds or SECONDS))
            advance()
    if flags.json != "-":
        for line in page(verdicts):
            screen.print(line)
    output.write(verdicts, flags.json)
    return 0 if all(verdict["passed"] for verdict in verdicts) else 1


# --- files ------------------------------------------------------------------------------------------------------------


def found(name):
    """The files that a FILE of the command line means: itself, the exercise of that name, or those in a folder."""
    if not name:
        raise ValueError(f"FILE is empty: name a file, an exercise or a folder. {known()}")
    path = Path(name)
    if os.path.isdir(path):  # False, too, for a name that is too long
        entries = list(islice(path.rglob("*"), MOST + 1))
        if len(entries) > MOST:
            raise ValueError(f"{name} holds more than {MOST:,} files and folders: name the folder of the answers")
        inside = [file for file in sorted(entries) if file.suffix.lower() == ".py" and not ours(file)]
        apart = [file for file in inside if "solutions" in file.relative_to(path).parts]
        no_file = [file for file in inside if file not in apart and not file.is_file()]
        others = [file for file in inside if file not in apart + no_file and not answered(file)]
        skipped = apart, no_file, others
        answers = [file for file in inside if not any(file in files for files in skipped)]
        if not answers:
            raise ValueError(f"{name} is a folder without an exercise in it. {known()}")
        for files, why in zip(skipped, LEFT_OUT, strict=True):
            if files:
                listed = ", ".join(str(file.relative_to(path)) for file in files)
                report.console(sys.stderr).print(f"{name}: left out, since {why}: {listed}", soft_wrap=True)
        return answers
    if os.path.exists(path):
        if not path.is_file() or path.suffix.lower() != ".py":
            raise ValueError(f"{name} is no Python file: an answer is a file such as 02_scores.py. {known()}")
        exercise_of(path)
        return [path]
    exercise = EXERCISES.get(path.name.removesuffix(".py"))
    if exercise is None or path.name != name:
        raise ValueError(
            f"{name}: there is no such file{'' if exercise else ', and no exercise of that name'}. {known()}"
        )
    here = Path(f"{exercise.name}.py")
    return [here if here.is_file() else exercise.file]


def ours(file):
    """Whether a file is one of the solutions that came with the exercises."""
    return Path(os.path.realpath(file)).parent == folder().resolve() / "solutions"


def known():
    return f"The exercises are {', '.join(EXERCISES)}."


def named(path):
    """The exercise whose name is in that of the file, as in 02_scores_ada.py, or None."""
    return next(
        (exercise for name, exercise in EXERCISES.items() if re.search(rf"(?<!\d){name}(?![a-z])", path.stem)), None
    )


def answered(path):
    """The exercise that a file answers, by its name or its first line, or None."""
    exercise = named(path)
    if exercise is None and path.is_file():
        try:
            with path.open("rb") as file:
                first = re.search(r"Exercise (\w+):", file.read(400).decode("utf-8", "replace"))
        except OSError:
            return None
        exercise = EXERCISES.get(first[1]) if first else None
    return exercise


def exercise_of(path):
    """The exercise that a file answers. ValueError where it is none."""
    exercise = answered(path)
    if exercise is None:
        raise ValueError(f"{path} is no exercise: its name should begin with that of one, as 02_scores.py. {known()}")
    return exercise


def verdict_on(path, seconds):
    """What is said of one file: that of the sandbox, or why it was not run."""
    start = time.monotonic()
    exercise = exercise_of(path)
    verdict = {"file": str(path), "exercise": exercise.name, "printed": "", "printed_bytes": 0}
    try:
        text = text_of(path)
        notes = remarks(exercise, text)
    except ValueError as error:
        spent = round(time.monotonic() - start, 2)
        return verdict | {"passed": False, "message": str(error), "criteria": {}, "notes": [], "seconds": spent}
    return verdict | sandbox.run(exercise, path.resolve(), seconds) | {"notes": notes}


def text_of(path):
    """The text of a Python file that parses. ValueError, in a beginner's words, where it is none."""
    try:
        data = path.read_bytes() if path.stat().st_size <= LARGEST else None
    except OSError as error:
        raise ValueError(f"The file cannot be read: {error.strerror}.") from None
    if data is None:
        raise ValueError(f"The file has more than {LARGEST:,} bytes: an answer is a few lines. Is it the right file?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"The file is not text in UTF-8 (byte {error.start} is 0x{data[error.start]:02x}). Save it as UTF-8 in "
            "your editor."
        ) from None
    if not text.strip():
        raise ValueError("The file is empty. `--copy DIR` gives you the exercise again.")
    if "\0" in text:
        raise ValueError("The file holds NUL characters, so that it is no text. Save it as UTF-8 in your editor.")
    try:
        parsed(text)
    except SyntaxError as error:
        if not error.lineno:
            raise ValueError(f"The file is not Python that can be run: {error.msg}.") from None
        line = "".join(python_lines(text)[error.lineno - 1 : error.lineno])
        raise ValueError(
            f"Line {error.lineno} is not Python that can be run: {error.msg}.\n\n"
            f"    {error.lineno}  {shortened(line)}\n\n"
            "The slip may also be in the line before: a bracket or a colon that is missing, or the indentation."
        ) from None
    except ValueError as error:
        raise ValueError(f"The file is not Python that can be run: {error}.") from None
    except (RecursionError, MemoryError):
        raise ValueError("The file is not Python that can be run: an expression in it is nested too deep.") from None
    return text


def shortened(line):
    """A line of a file for a message, without its indentation and of what is too long the beginning."""
    return report.cut(line.strip(), LINE)


def parsed(text):
    """The syntax tree; Python's warnings about it are for those who run the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def remarks(exercise, text):
    """What is worth saying beside the verdict: a hole as it was, another specification."""
    notes = []
    theirs = hole(text)
    if theirs and [line.strip() for line in theirs[1] if line.strip()] == [line.strip() for line in exercise.start]:
        notes.append(f"The hole in line {theirs[0]} is as it was: your code goes there.")
    ours, changed = (specification(source) for source in (exercise.solution, text))
    if changed is not None and changed != ours:
        notes.append(
            "The function `specification` is not that of the exercise. That changes nothing: check has its own."
        )
    return notes + floats.notes(parsed(text), types_of_inputs(exercise))[:NOTES]


def types_of_inputs(exercise):
    """{name of an input: the type of its elements}, of those that an answer's kernel may name as the exercise does."""
    _, inputs = next(iter(exercise.inputs()))
    names = (argument.arg for argument in function("specification", exercise.solution).args.args)
    return {name: floats.of_dtype(x.dtype) for name, x in zip(names, inputs, strict=True)}


def function(name, text):
    """The syntax tree of a function of a file, or None."""
    functions = [node for node in parsed(text).body if isinstance(node, ast.FunctionDef)]
    return next((node for node in functions if node.name == name), None)


def specification(text):
    """The syntax tree of the function `specification`, as text, or None."""
    found = function("specification", text)
    return found and ast.dump(found)


# --- what is shown ----------------------------------------------------------------------------------------------------


def listing(flags, screen):
    rows = [[e.name, e.lesson, e.lines, e.title] for e in EXERCISES.values()]
    if flags.json != "-":
        screen.print(report.table(["exercise", "lesson", "lines", "what it is about"], rows))
        screen.print("")
        screen.print(report.prose(f"""
            The files are in {shown_folder()}. Each is to be worked on after the part of the lesson that its first line
            names. `--copy DIR` makes copies to work on. Then:

                {COMMAND} 00_guard             judges 00_guard.py
                {COMMAND} 00_guard --hint 1    a hint; 2 and 3 say more
                {COMMAND} 00_guard --solution  a solution
        """))  # fmt: skip
    figures = [{"exercise": e.name, "lesson": e.lesson, "part": e.part, "lines": e.lines, "title": e.title}
               for e in EXERCISES.values()]  # fmt: skip
    output.write(figures, flags.json)
    return 0


def shown_folder():
    try:
        return folder().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(folder())


def show_help(exercise, flags, screen):
    screen.print(report.heading(f"{exercise.name} · {exercise.title}", f"lesson {exercise.lesson}"))
    for number, hint in enumerate(exercise.hints[: flags.hint or 0], 1):
        screen.print("")
        screen.print(report.prose(f"Hint {number} of {len(exercise.hints)}. {hint}"))
    if flags.solution:
        number, lines = hole(exercise.solution)
        screen.print("")
        for at, line in enumerate(lines, number):
            screen.print(f" {at:>3}  {line}", soft_wrap=True)


def copy(flags, screen):
    if not flags.copy:
        raise ValueError("--copy '' names no folder: give it one, such as work")
    wanted = [exercise_of(Path(name)) for name in flags.files] or list(EXERCISES.values())
    target = Path(flags.copy)
    try:
        target.mkdir(parents=True, exist_ok=True)
        made = [exercise for exercise in wanted if not (target / exercise.file.name).exists()]
        for exercise in made:
            mine = target / exercise.file.name
            text = exercise.unsolved.replace(f"{COMMAND} {exercise.name}", f"{COMMAND} {mine.as_posix()}")
            mine.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--copy {flags.copy}: {error.strerror}: name a folder that you can write to") from None
    kept = len(wanted) - len(made)
    kept = f"; {kept} were there and stay as they are" if kept else ""
    screen.print(f" copied to {target}: {lesson.plural(len(made), 'exercise')}{kept}", soft_wrap=True)
    return 0


def page(verdicts):
    """The report, as things to print: one answer in full, or a line for each of several."""
    if len(verdicts) == 1:
        yield from full(verdicts[0])
        return
    files = ends([v["file"] for v in verdicts])
    rows = [
        [file, *(SHORT[v["criteria"].get(name, {}).get("passed")] for name in CRITERIA), SHORT[v["passed"]],
         f"{v['seconds']:.1f}"]
        for file, v in zip(files, verdicts, strict=True)
    ]  # fmt: skip
    yield report.table(["file", *CRITERIA, "passed", "seconds"], rows)
    yield ""
    good = sum(verdict["passed"] for verdict in verdicts)
    yield report.prose(f"{good} of {len(verdicts)} passed. Check a file alone to read why; --json keeps all of it.")


def ends(files):
    """Paths for a table: without the folder that all share, and of what is too long the end."""
    paths = [Path(file).parts for file in files]
    shared = 0
    while all(len(parts) > shared + 1 and parts[shared] == paths[0][shared] for parts in paths):
        shared += 1
    names = ["/".join(parts[shared:]) for parts in paths]
    return [name if len(name) <= PATH else f"…{name[1 - PATH :]}" for name in names]


def full(verdict):
    exercise = EXERCISES[verdict["exercise"]]
    yield report.heading(f"{exercise.name} · {exercise.title}", f"lesson {exercise.lesson}, {verdict['seconds']:.1f} s")
    file = verdict["file"]
    yield f" {file if len(file) < report.WIDTH else '…' + file[2 - report.WIDTH :]}"
    yield ""
    criteria = verdict["criteria"]
    if verdict["message"]:
        yield report.prose(verdict["message"])
    else:
        marks = {True: "✓", False: "✗", None: "–"}
        meaning = {
            "correct": "the output of the specification, on every input",
            "strict": "no wrong index, no race, all come to each barrier",
            "bill": "no more loads and stores than the exercise allows",
            "parallel": "no thread does the work of the others",
        }
        yield report.table(["", "criterion", "met", "what it asks for"], [
            [marks[criteria[name]["passed"]], name, WORDS[criteria[name]["passed"]], meaning[name]] for name in CRITERIA
        ])  # fmt: skip
        yield ""
    for note in verdict["notes"]:
        yield report.prose(note)
    for name in CRITERIA:
        message = criteria.get(name, {}).get("message")
        if message:
            yield report.prose(f"{name}: {message}")
    rows = criteria.get("bill", {}).get("rows") or []
    if rows and not verdict["message"] and criteria["correct"]["passed"]:
        yield report.table(["tensor", "", "counted", "at most", "for"], [
            [row["tensor"], row["kind"], row["counted"], row["bound"], f"{row['formula']}; {row['input']}"]
            for row in rows
        ])  # fmt: skip
        yield ""
    yield from printed(verdict)
    if verdict["passed"]:
        yield report.prose("Passed.")
    else:
        yield report.prose(f"Not passed yet. A hint: `{COMMAND} {exercise.name} --hint 1`")


def printed(verdict):
    """What the answer printed, and how much of it was cut."""
    text, size = verdict.get("printed", ""), verdict.get("printed_bytes", 0)
    if text.strip():
        lines = text.splitlines()[:10]
        cut = "" if size == len("\n".join(lines).encode()) + 1 else f", the beginning of {report.in_bytes(size)}"
        yield report.prose(f"Your file printed{cut}:")
        yield "\n".join(f"    {''.join(c for c in line if c.isprintable())[:72]}" for line in lines)
        yield ""
