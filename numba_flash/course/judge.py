"""Judges one answer: runs it on every input, on the strict CPU engine, and compares output and HBM bill.

What passes runs once more, recorded: no thread may do the work of the others.

`python -m numba_flash.course.judge EXERCISE FILE RESULT` is what the sandbox starts, in a process of its own. It writes
JSON to RESULT, a line each time: what it is about to do, and at last the verdict.
"""

import ast
import contextlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
from numba import cuda

import numba_flash as nf

from .. import errors, report
from ..engine import access, cpu
from ..engine.cpu import POISON, position
from ..engine.rewrite import function_of, is_kernel
from ..lesson import plural
from .exercise import load, python_lines
from .exercises import EXERCISES
from .raised import at_line
from .rounding import truth_and_limit

CRITERIA = "correct", "strict", "bill", "parallel"
FAR = 1.5  # times what the bill allows
NEARLY_ALL = 0.9  # of the work of a block
MANY = 0.25  # of the threads of a block
ALIKE = 1e-3  # how near an output must be to that of a known mistake, relative: a matter of messages, not of verdicts
FAULTS = {
    "RaceDetected": "two threads touch one element, one of them writes, and no barrier says who comes first.",
    "BarrierDivergence": "all threads of a block must come to the same barriers: put the barrier outside of the `if`.",
    "OutOfBounds": "an index is past the end: who has no element must neither load nor store.",
    "UninitializedRead": "something is read before anything was written to it.",
}
ONE_LINE = (
    "several threads store the same element, and no barrier parts the threads in one line. Each stores an element of "
    "its own: its index must depend on the thread's number, and no loop goes over elements of others."
)
SERIAL = (
    "one thread goes through what all threads should share. A kernel says what one thread does; the launch starts it "
    "for all of them, each with a number of its own."
)
LINE = 70  # columns of a line of the file in a message
FEW = "its threads are too few: they share the work, and each has too much of it."
REASONS = {  # of what the compiler says: the first pattern that is found
    r"indexed with integers and slices, not with float": "an index is a float. `/` gives a float, of whole numbers, "
    "too: write // to divide them.",
    r"Variable '(\w+)' is not defined": "`{0}` has no value when it is first used: begin it, as in {0} = float32(0).",
    r"failed to unpack int": "one number cannot be two: cuda.grid(1) gives one, cuda.grid(2) gives two.",
    r"(\d+) indices for an array with (\d+) ax": "there are {0} indices, and the array has {1} of its axes to name.",
    r"tuple index out of range": "the shape has fewer axes: the first is X.shape[0].",
    r"Unknown attribute '(\w+)' of type": "there is no `.{0}` here. An array has .shape and its elements.",
    r"(?:Sets, got|>>> \w+) ?\(.*UniTuple": "a tuple stands where a number should. X.shape is a tuple, and X.shape[0] "
    "a number; cuda.grid(2) is a tuple, cuda.grid(1) a number.",
    r"(?:Sets, got|>>> \w+) ?\(.*(?:nf\.Tensor|array)\(": "an array, or a row of one, stands where a number should: "
    "name the element, as in X[i] or S[i, j].",
    r">>> \w+\(.*none": "None stands where a number should: begin a sum with float32(0).",
}
AGAIN = "all threads do this alike, each of them again. Share it out: each does a part, and a barrier makes it known."
ONLY = "(A kernel knows numbers, elements such as X[i], loops, if and math; no lists, and nothing on whole arrays.)"


class Refused(Exception):
    """The answer cannot be judged at all; the message says why, in a beginner's words."""


def judge(exercise, path, tell=lambda **event: None):
    """The verdict on a file -> {"passed", "message" or None, "criteria": {name: {"passed", "message", …}}}.

    passed is None where it was not judged. Runs the file, and the student's kernel under NUMBA_FLASH_STRICT=1 and
    NUMBA_FLASH_DEVICE=cpu, which the caller sets.
    """
    criteria = {name: {"passed": None, "message": ""} for name in CRITERIA}
    try:
        tell(at="import")
        launch, trusted = prepared(exercise, path)
        rows = {}
        with own_kernels_alone():
            for number, (name, inputs) in enumerate(exercise.inputs()):
                tell(at="run", input=name)
                if not judged(exercise, path, launch, trusted, name, inputs, criteria, rows, first=number == 0):
                    break
        criteria["bill"]["rows"] = list(rows.values())
        moved = any(row["counted"] for row in rows.values())
        if criteria["strict"]["passed"] is None:  # no launch was stopped: what was not found wrong is right
            for criterion in ("correct", "strict", "bill") if moved else ("correct", "strict"):
                criteria[criterion]["passed"] = criteria[criterion]["passed"] is not False
        if all(criteria[criterion]["passed"] for criterion in ("correct", "strict", "bill")):
            tell(at="run", input=name)
            criteria["parallel"] = shared_out(exercise, path, launch, trusted)
    except Refused as refusal:
        return {"passed": False, "message": str(refusal), "criteria": criteria}
    return {"passed": all(verdict["passed"] for verdict in criteria.values()), "message": None, "criteria": criteria}


# --- the file ---------------------------------------------------------------------------------------------------------


def prepared(exercise, path):
    """(launch, the trusted module), launch(*inputs) -> outputs with the student's kernel in the trusted launch."""
    trusted = exercise.trusted()
    ours = getattr(trusted, exercise.answer)
    module = imported(path)
    theirs = getattr(module, exercise.answer, None)
    if theirs is None:
        raise Refused(f"There is no `{exercise.answer}` in your file. Keep that name: it is what is launched.")
    for name, value in vars(trusted).items():
        if is_kernel(ours) and type(value) is int and getattr(module, name, value) != value:
            raise Refused(
                f"{name} is {getattr(module, name)!r} in your file and {value} in the exercise, which launches the "
                f"kernel for {name} = {value}. Set it back."
            )
    if not is_kernel(ours):
        if not callable(theirs) or is_kernel(theirs):
            raise Refused(f"`{exercise.answer}` must be a function that launches kernels: def {exercise.answer}(...).")
        same_parameters(exercise.answer, function_of(theirs) or theirs, ours)
        return lambda *inputs: theirs(*inputs), trusted
    if not is_kernel(theirs):
        raise Refused(f"`{exercise.answer}` is no kernel: it needs `@cuda.jit` in the line above its `def`.")
    if getattr(theirs, "targetoptions", {}).get("device"):
        raise Refused(f"`{exercise.answer}` is a device function: write `@cuda.jit` above it, without device=True.")
    same_parameters(exercise.answer, function_of(theirs), function_of(ours))
    setattr(trusted, exercise.answer, theirs)
    return trusted.launch, trusted


def same_parameters(name, theirs, ours):
    code = getattr(theirs, "__code__", None)
    given = code.co_varnames[: code.co_argcount] if code else ()
    wanted = ours.__code__.co_varnames[: ours.__code__.co_argcount]
    if given != wanted:
        raise Refused(
            f"`{name}` takes ({', '.join(given)}) in your file, and ({', '.join(wanted)}) in the exercise. It is "
            "launched with the latter, in this order: set them back."
        )


def imported(path):
    """The student's module. Refused, with the line, where it cannot be run to its end."""
    sys.path.append(str(Path(path).resolve().parent))  # at the end: a file called random.py must not hide Python's
    try:
        return load(path)
    except ModuleNotFoundError as error:
        raise Refused(
            f"Your file imports {error.name!r}{at_line(path, error)}, which is not installed here. An exercise needs "
            "numba, numpy and numba_flash alone."
        ) from None
    except SystemExit as error:
        raise Refused(f"Your file ends Python by sys.exit{at_line(path, error)}. Take that out.") from None
    except EOFError as error:
        raise Refused(f"Your file waits for input{at_line(path, error)}, and nobody answers. Take that out.") from None
    except cuda.CudaSupportError as error:
        raise Refused(
            f"Your file asks for a GPU{at_line(path, error)}, and check works without one. `@cuda.jit` needs no "
            "signature: leave out what stands in its brackets. A kernel is launched by nf.launch alone."
        ) from None
    except MemoryError as error:
        raise Refused(f"Your file asks for more memory than check gives it{at_line(path, error)}.") from None
    except BaseException as error:
        raise Refused(f"Your file cannot be imported: it stops{at_line(path, error)} with {told(error)}") from None


def told(error):
    """Kind and message of an error that a file raised, some of which cannot be read."""
    try:
        return f"{type(error).__name__}: {error!s:.300}"
    except BaseException:
        return f"{type(error).__name__}, whose message cannot be read"


@contextlib.contextmanager
def each_launch(look):
    """In the body, look(kernel, arguments) comes before each launch, and may refuse it."""
    run = cpu.run

    def guarded(kernel, grid, block, arguments, *more):
        look(kernel, arguments)
        return run(kernel, grid, block, arguments, *more)

    cpu.run = guarded
    try:
        yield
    finally:
        cpu.run = run


def own_kernels_alone():
    """In the body, to launch a kernel of a stage of numba_flash is refused: it is no answer."""

    def look(kernel, _):
        if Path(function_of(kernel).__code__.co_filename).parent == Path(nf.__file__).parent / "stages":
            name = function_of(kernel).__name__
            raise Refused(f"Your file runs `{name}`, a stage of numba_flash. Here a kernel of your own is asked for.")

    return each_launch(look)


def nothing_ready(exercise, trusted, inputs, name):
    """In the body, to launch a kernel that is given the outputs, other than as an input, is refused."""
    truths = [np.asarray(truth) for truth, _ in truth_and_limit(trusted.specification, inputs)]
    arrays = [x for x in inputs if isinstance(x, np.ndarray)]

    def look(kernel, arguments):
        for parameter, x in zip(function_of(kernel).__code__.co_varnames, arguments):
            if not isinstance(x, np.ndarray) or any(holds(x, array) for array in arrays):
                continue
            if any(holds(x, truth) for truth in truths):
                raise Refused(
                    f"When `{function_of(kernel).__name__}` is launched for {name}, its argument {parameter} holds the "
                    f"answer already: it is not the kernels of `{exercise.answer}` that compute it. Here a kernel of "
                    "your own is to do it."
                )

    return each_launch(look)


def holds(x, wanted):
    """Whether an array has these elements, in this order, whatever its shape and type."""
    if x.size != wanted.size or x.dtype.kind not in "iuf":
        return False
    return np.allclose(x.ravel(), wanted.ravel(), rtol=ALIKE, atol=ALIKE * 1e-2)


# --- one input --------------------------------------------------------------------------------------------------------


def judged(exercise, path, launch, trusted, name, inputs, criteria, rows, *, first):
    """Run one input and enter what is wrong; False where it makes no sense to go on.

    first: the first input, which is none of those on which a step of a right answer happens to be the answer itself.
    """
    sizes = exercise.all_sizes(trusted, inputs)
    own = not is_kernel(getattr(trusted, exercise.answer))
    watch = nothing_ready(exercise, trusted, inputs, name) if own and first else contextlib.nullcontext()
    with watch, nf.ledger() as bill:
        got = ran(exercise, path, launch, name, inputs, criteria)
    if got is None:
        return False
    if own and not bill.launches:
        raise Refused(
            f"`{exercise.answer}` launched no kernel: its bill shows no loads and no stores. NumPy's answer is the "
            "specification; here a kernel of your own is to give it, launched by nf.launch."
        )
    if own:
        by_kernels(exercise, bill, inputs, got, name)
    fault = changed(trusted, bill, name) or wrong(exercise, got, trusted, sizes, name, inputs)
    if fault:
        criteria["correct"] = {"passed": False, "message": fault}
    over(exercise, bill, sizes, name, criteria, rows, fault)
    return not fault


def by_kernels(exercise, bill, inputs, got, name):
    """Refused where kernels load less than the inputs, or store less than the outputs: something else gave them."""
    for kind, arrays in (("loads", inputs), ("stores", got)):
        moved = sum(getattr(count, kind) for tensors in bill.kernels.values() for count in tensors.values())
        least = sum(x.size for x in arrays if isinstance(x, np.ndarray))
        if moved < least:
            raise Refused(
                f"The kernels that `{exercise.answer}` launches make {plural(moved, kind[:-1])} for {name}, where the "
                f"{'inputs' if kind == 'loads' else 'outputs'} have {least:,} elements: it is not they that compute "
                "the answer. Here a kernel of your own is to do it."
            )


def ran(exercise, path, launch, name, inputs, criteria):
    """The outputs, a tuple of arrays; None where strict mode stopped the launch, which is entered."""
    given = [np.array(x) if isinstance(x, np.ndarray) else x for x in inputs]
    try:
        found = launch(*given)
    except Refused:
        raise
    except errors.Unsupported as error:
        raise Refused(f"The kernel cannot be run: {unsupported(path, error)}\n\n{ONLY}") from None
    except (errors.SharedMemoryError, errors.OutOfMemory) as error:
        raise Refused(f"{error}") from None
    except errors.KernelError as error:
        criteria["strict"] = {"passed": False, "message": stopped(exercise, path, error, name), "line": error.line}
        return None
    except SystemExit:
        raise Refused(f"`{exercise.answer}` ends Python by sys.exit. Take that out.") from None
    except MemoryError:
        raise Refused(f"`{exercise.answer}` asks for more memory than check gives it.") from None
    except BaseException as error:
        raise Refused(f"It stops{at_line(path, error)} for {name}, with {told(error)}") from None
    return found if isinstance(found, tuple) else (found,)


def changed(trusted, bill, name):
    """The message for a kernel that stores to one of its inputs, or None."""
    code = trusted.specification.__code__
    for parameter in code.co_varnames[: code.co_argcount]:
        counts = [tensors[parameter] for tensors in bill.kernels.values() if parameter in tensors]
        if any(count.stores or count.atomics for count in counts):
            return f"Your kernel changed {parameter}, its input, for {name}. Store to the result alone."
    return None


def in_file(path, message):
    """An engine's message without the path of the file: the student knows which one it is."""
    return message.replace(f"{path}, ", "")


def unsupported(path, error):
    """What an engine said of a kernel that it cannot run, without what the compiler says, which is not for readers."""
    said, compiler, _ = in_file(path, str(error)).partition(" cannot be compiled: ")
    if not compiler:
        said = re.sub(r"(,? or run|: run this kernel) on a GPU", "", said)
        return said.replace("the CPU engine here", "the CPU engine, which runs every answer here: do without it") + "."
    line = f"\n\n{shown(path, [error.line])}" if error.file == str(path) else ""
    reason = compiler_reason(f"{error} {error.__cause__}")
    return f"{said} cannot be compiled.{line}" + (f"\nLikely: {reason}" if reason else "")


def compiler_reason(text):
    """What a compiler's message means for a beginner, or None."""
    for pattern, reason in REASONS.items():
        if found := re.search(pattern, text):
            return reason.format(*found.groups())
    return None


def lines_of(path):
    return python_lines(Path(path).read_text(encoding="utf-8-sig"))


def shown(path, lines):
    """These lines of the file, numbered."""
    text = lines_of(path)
    return "".join(f"    {number}  {report.cut(text[number - 1].strip(), LINE)}\n" for number in lines)


def stopped(exercise, path, error, name):
    said = in_file(path, str(error))
    lines = {error.line, *map(int, re.findall(r"in line (\d+)", said))} if error.file == str(path) else set()
    likely = likely_fault(exercise, path, error, said)
    return f"{type(error).__name__} for {name}. {said}.\n\n{shown(path, sorted(lines))}\nLikely: {likely}"


def likely_fault(exercise, path, error, said):
    """What is likely where the engine stopped a kernel: of this axis of the tensor, of the tensor, or of the kind."""
    kind, axis = type(error).__name__, re.search(r", axis (\d)", said)
    keys = [f"{kind} {error.tensor} {axis[1]}"] if axis else []
    likely = next(
        (exercise.faults[key] for key in (*keys, f"{kind} {error.tensor}", kind) if key in exercise.faults), ""
    )
    likely = likely or FAULTS.get(kind, "")
    if kind == "RaceDetected" and stored_by_all(path, error, said):
        return exercise.faults.get("RaceDetected in one line") or (ONE_LINE if "barrier" in likely else likely)
    return likely


def stored_by_all(path, error, said):
    """Whether threads of a block race for one element that they all store in one line: tile[0] += tile[tx]."""
    if re.search(r"which thread .* writes in line \d+ too", said):
        return True
    if error.file != str(path) or f"writes in line {error.line} " not in said:
        return False
    try:
        statement = ast.parse(lines_of(path)[error.line - 1].strip()).body[0]
    except (SyntaxError, IndexError):  # a part of a statement
        return False
    target = getattr(statement, "target", None)
    if not isinstance(target, ast.Subscript) or ast.unparse(target.value) != error.tensor:
        return False
    index = re.sub(r"(cuda\.)?(blockIdx|blockDim|gridDim)\.\w", "", ast.unparse(target.slice))
    return not re.search(r"[A-Za-z_]\w*", index)


# --- correctness ------------------------------------------------------------------------------------------------------


def wrong(exercise, got, trusted, sizes, name, inputs):
    """What is wrong with the outputs, or None."""
    expected = truth_and_limit(trusted.specification, inputs)
    if len(got) != len(expected):
        return f"It returns {len(got)} arrays for {name}, expected {len(expected)}: {', '.join(exercise.outputs)}."
    for output, x, (truth, limit) in zip(exercise.outputs, got, expected, strict=True):
        if not isinstance(x, np.ndarray):
            return f"{output} is {x!r:.60}, a {type(x).__name__}: return the array, nf.to_host({output})."
        if x.shape != truth.shape or x.dtype != np.float32:
            return f"{output} has shape {x.shape} and dtype {x.dtype}, expected {truth.shape} and float32."
        bad = ~fits(x, truth, limit)
        if bad.any():
            return " ".join(explained(exercise, output, x, truth, limit, bad, sizes, name, inputs, got))
    return None


def fits(x, truth, limit):
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(truth), np.abs(x - truth) <= limit, x == truth)


def explained(exercise, output, x, truth, limit, bad, sizes, name, inputs, got):
    """The sentences of the message: where, expected and got, what the wrong elements share, the likely mistake."""
    at = tuple(map(int, np.argwhere(bad)[0]))
    element = f"{output}[{', '.join(map(str, at))}]"
    unwritten = x.view(np.uint32) == POISON * 0x01010101
    if unwritten.all():
        yield f"No element of {output} was written, for {name}. {element} should be {truth[at]:.6g}."
        return
    what = "was never written" if unwritten[at] else f"is {x[at]:.6g}"
    yield f"{element} {what}, expected {truth[at]:.6g}, for {name}."
    tile = place(exercise, at, sizes)
    if tile:
        yield tile
    if not unwritten[at] and np.isfinite(x[at]) and np.isfinite(truth[at]):
        yield f"(Rounding explains a difference of {limit[at]:.1e}.)"
    count = f"{int(bad.sum()):,} of {bad.size:,} elements are wrong"
    yield f"{count}{pattern(bad)}."
    likely = known(exercise, inputs, got)
    missing = unwritten & bad
    if missing.any() and not missing[bad].all():
        yield f"Of these, {int(missing.sum()):,} were never written."
    if not likely and missing[bad].all():
        likely = exercise.faults.get("unwritten") or "an element is stored by no thread."
    elif not likely:
        likely = exercise.faults.get("wrong")
    ratio = factor(x, truth, bad) if not likely or likely == exercise.faults.get("wrong") else None
    if ratio and f"{ratio:.4g}" == "1":
        yield (
            "They are nearly right: a formula loses digits. Does it round a large number, such as m + log l, before "
            "the difference is taken?"
        )
    elif ratio:
        yield f"All are {ratio:.4g} times what they should be."
    elif likely:
        yield f"{'To find it' if likely == exercise.faults.get('wrong') else 'Likely'}: {likely}"


def place(exercise, at, sizes):
    """Where an element lies among the tiles: "That is in tile 2 (T = 8), in its row 3." """
    sides = [(axis, sizes[side], side) for axis, side in enumerate(exercise.grid) if side and axis < len(at)]
    if not sides:
        return ""
    tile = ", ".join(str(at[axis] // size) for axis, size, _ in sides)
    inside = ", ".join(f"{('row', 'column')[axis]} {at[axis] % size}" for axis, size, _ in sides)
    tile = f"({tile})" if len(sides) > 1 else tile
    has = " × ".join(str(size) for _, size, _ in sides) + " rows" * (len(sides) == 1)
    return f"That is {inside} of tile {tile}; a tile has {has}."


def pattern(bad):
    """What the places of the wrong elements have in common: the end of an axis, or a few rows or columns."""
    if bad.all() or bad.ndim > 2:
        return ""
    for axis, noun in enumerate(("row", "column") if bad.ndim == 2 else ("element",)):
        lines = bad.any(axis=1 - axis) if bad.ndim == 2 else bad
        numbers = np.flatnonzero(lines)
        if len(numbers) == 1 and lines.size > 2:
            return f", all in {noun} {numbers[0]} of {lines.size}"
        if len(numbers) < lines.size and numbers[-1] - numbers[0] + 1 == len(numbers) and lines[-1]:
            return f", all from {noun} {numbers[0]} on, up to the end of {lines.size}"
        if len(numbers) <= min(8, lines.size // 2):
            return f", all in {noun}s {', '.join(map(str, numbers))}"
    return ""


def factor(x, truth, bad):
    """The one number that all wrong elements are off by, or None."""
    with np.errstate(all="ignore"):
        ratios = (x / truth)[bad & (np.abs(truth) > 1e-3)]
    if len(ratios) < 2 or not np.isfinite(ratios).all():
        return None
    return float(ratios[0]) if np.allclose(ratios, ratios[0], rtol=ALIKE) and abs(ratios[0]) > ALIKE else None


def known(exercise, inputs, got):
    """The sentence of a known mistake whose outputs are these, or None."""
    for mistake in exercise.mistakes:
        with np.errstate(all="ignore"):
            outputs = mistake.outputs(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(outputs) == len(got) and all(alike(x, y) for x, y in zip(got, outputs)):
            return mistake.says
    return None


def alike(x, y):
    y = np.asarray(y)
    return x.shape == y.shape and np.allclose(x, y, rtol=ALIKE, atol=ALIKE * 1e-2, equal_nan=True)


# --- the bill ---------------------------------------------------------------------------------------------------------


def over(exercise, bill, sizes, name, criteria, rows, fault):
    """Enter the lines of the bill for this input; the first input, and the first at which a line is too high, stay.

    What is likely is left out where the output is wrong and the line hardly too high: the fault may be all there is.
    """
    counted = {}
    for tensors in bill.kernels.values():
        for tensor, count in tensors.items():
            for kind in ("loads", "stores", "atomics"):
                counted[tensor, kind] = counted.get((tensor, kind), 0) + getattr(count, kind)
    bounds = {(bound.tensor, bound.kind): bound for bound in exercise.bill}
    total = ("total", "elements")
    lines = [total] if total in bounds else [*bounds, *(key for key, n in counted.items() if n and key not in bounds)]
    for key in lines:
        bound = bounds.get(key)
        moved = bill.elements if key == total else counted.get(key, 0)
        most = bound.value(sizes) if bound else 0
        row = {"tensor": key[0], "kind": key[1], "counted": moved, "bound": most, "input": name,
               "formula": str(bound) if bound else "0"}  # fmt: skip
        if moved > most and (key not in rows or rows[key]["counted"] <= rows[key]["bound"]):
            rows[key] = row
            likely = bound.likely if bound else f"{key[0]} has no {key[1]} in this exercise"
            detail = largest(bill) if key == total else ""
            more = f" = {row['formula']}, {moved / most:.3g} times as much" if most else ""
            likely = "" if fault and moved <= FAR * most else f" Likely: {likely}."
            add(criteria["bill"], f"{key[0]} {key[1]} {moved:,}, at most {most:,}{more}, for {name}.{detail}{likely}")
        elif moved or most:
            rows.setdefault(key, row)


def add(verdict, message):
    verdict["passed"] = False
    verdict["message"] = "\n\n".join(filter(None, (verdict["message"], message)))


def largest(bill):
    """The lines of a bill that move most, as a sentence."""
    lines = [
        (getattr(count, kind), f"{tensor} {kind}")
        for tensors in bill.kernels.values()
        for tensor, count in tensors.items()
        for kind in ("loads", "stores", "atomics")
        if getattr(count, kind)
    ]
    return " Most of it: " + ", ".join(f"{what} {number:,}" for number, what in sorted(lines, reverse=True)[:3]) + "."


# --- who does the work ------------------------------------------------------------------------------------------------


def shared_out(exercise, path, launch, trusted):
    """The criterion "parallel": whether no thread does more than its share, on one input, recorded."""
    name, inputs = list(exercise.inputs())[exercise.counted_on]
    sizes = exercise.all_sizes(trusted, inputs)
    try:
        with own_kernels_alone(), not_strict(), nf.recording() as record:
            launch(*(np.array(x) if isinstance(x, np.ndarray) else x for x in inputs))
    except Refused:
        raise
    except Exception as error:
        message = f"What each thread does could not be counted, for {name}: {in_file(path, str(error)):.300}."
        return {"passed": False, "message": message}
    own = not is_kernel(getattr(trusted, exercise.answer))
    for one in record.launches:
        for share in exercise.share:
            fault = too_much(one, share, sizes, own, name)
            if fault:
                return {"passed": False, "message": fault}
    return {"passed": True, "message": ""}


def too_much(launch, share, sizes, own, name):
    """What the busiest thread of a recorded launch, for the input `name`, does beyond its share, as sentences; or None.

    own: whether the answer chose grid and block. Where the exercise did, and many threads of the block do about as much
    in shared memory, none of them does what is another one's; but each may do again what all do.
    """
    space = {"HBM": "global", "shared memory": "shared"}[share.space]
    numbers = [number for number, array in enumerate(launch.arrays) if array and array.space == space]
    there = (launch.kind != access.NOTE) & np.isin(launch.array, numbers)
    threads = int(np.prod(launch.block))
    block = np.searchsorted(launch.ends, np.flatnonzero(there), side="right")
    done = np.bincount(block * threads + launch.thread[there], minlength=len(launch.blocks) * threads)
    done = done.reshape(len(launch.blocks), threads)
    most, allowed = done.max(), share.value(sizes)
    if most <= allowed:
        return None
    at, thread = map(int, np.unravel_index(done.argmax(), done.shape))
    alike = (2 * done[at] >= most).mean() >= MANY and threads > 1
    if alike and not own and space == "shared" and most <= share.alike * allowed:
        return None
    who = f"Thread {place_of(position(thread, launch.block), launch.block)}"
    whose = f"block {place_of(launch.blocks[at], launch.grid)}"
    if threads == 1:
        does = f"{whose[0].upper()}{whose[1:]} has one thread, which does all its work"
    elif most >= NEARLY_ALL * done[at].sum():
        does = f"{who} does {'all' if most == done[at].sum() else 'nearly all'} the work of {whose}"
    else:
        does = f"{who} of {whose} does more than its share"
    return (
        f"{does}: {most:,} loads and stores in {share.space}, where each thread should do at most {allowed:,} = "
        f"{share}, {share.why}. (For {name}.) Likely: {(share.likely or (FEW if own else AGAIN)) if alike else SERIAL}"
    )


def place_of(position, extent):
    """ "3", or "(3, 0)" where there is more than one axis."""
    axes = max([1, *(axis + 1 for axis, size in enumerate(extent) if size > 1)])
    return str(position[0]) if axes == 1 else f"({', '.join(map(str, position[:axes]))})"


@contextlib.contextmanager
def not_strict():
    """In the body launches are not strict: a recording follows no races."""
    before = os.environ.pop("NUMBA_FLASH_STRICT", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["NUMBA_FLASH_STRICT"] = before


# --- the process that the sandbox starts ------------------------------------------------------------------------------


def limit(what, most):
    """The most of a resource that this process may have, where the system can say no."""
    try:
        import resource

        resource.setrlimit(getattr(resource, what), (most, most))
    except (ImportError, AttributeError, OSError, ValueError):  # Windows; a system that cannot
        pass


def main(name, path, result, memory, seconds):
    limit("RLIMIT_DATA", int(memory))
    limit("RLIMIT_CPU", int(seconds))  # should the process that waits for this one be gone
    sys.argv = [path]
    with open(result, "w", encoding="utf-8", buffering=1) as file:

        def tell(**event):
            print(json.dumps(event), file=file, flush=True)

        tell(verdict=judge(EXERCISES[name], path, tell))
    sys.stdout.flush()
    os._exit(0)  # nothing that the file left behind, such as a thread, keeps this process


if __name__ == "__main__":
    main(*sys.argv[1:])
