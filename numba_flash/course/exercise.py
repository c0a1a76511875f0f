"""What an exercise is made of, and where its files are.

The kernel, its launch and its specification are read from the solution's file, which the student does not hand in; what
goes with them, the inputs, the bill, the hints and the known mistakes, stands in `numba_flash.course.exercises`.
"""

import ast
import importlib.util
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import SourceFileLoader
from pathlib import Path

BEGIN, END = "# --- your code", "# --- end of your code"
_HEAD = re.compile(r'Exercise (\w+): (.+?)\. After "(.+?)" in lesson (\d\d), (\d+) lines\.')
_numbers = itertools.count()


@dataclass(frozen=True)
class Bound:
    """A line of the bill: `kind` (loads or stores) of `tensor` are at most `formula`, for the reason `why`.

    formula: Python, in the sizes of the exercise; tiles(a, b) is ⌈a/b⌉. tensor "total": all elements of all tensors.
    likely: what an answer that moves more probably does.
    """

    tensor: str
    kind: str
    formula: str
    why: str
    likely: str

    def value(self, sizes):
        return evaluated(self.formula, sizes)

    def __str__(self):
        return written(self.formula)


@dataclass(frozen=True)
class Share:
    """What one thread of a launch may do at most: `formula` loads and stores in `space`, HBM or shared memory.

    why: what these are, for a thread that does its part; more of them is the work of other threads. alike: so many
    times as much may be done in shared memory where many threads of the block do it. likely: what they probably do who
    all do more, where this is not the work of others.
    """

    space: str
    formula: str
    why: str
    alike: int = 2
    likely: str = ""

    def value(self, sizes):
        return evaluated(self.formula, sizes)

    def __str__(self):
        return written(self.formula)


def evaluated(formula, sizes):
    names = {"__builtins__": {}, "tiles": lambda a, b: -(-a // b), "log2": lambda n: n.bit_length() - 1}
    return int(eval(formula, names, dict(sizes)))


def written(formula):
    """A formula for readers: ⌈N/T⌉ for tiles(N, T), a dot for the product."""
    text = re.sub(r"tiles\(([\w*]+), (\w+)\)", r"⌈\1/\2⌉", formula)
    return re.sub(r"log2\((\w+)\)", r"log₂\1", text).replace("*", "·")


@dataclass(frozen=True)
class Mistake:
    """A known wrong answer: outputs(*inputs) gives what it comes to, in float32; `says` explains it."""

    says: str
    outputs: Callable


@dataclass(frozen=True)
class Exercise:
    """answer: the name of what the student writes, a kernel, or a function with the specification's parameters.

    inputs() yields (name, tuple of the arguments of `specification` and `launch`). sizes(*those) gives what the bill's
    formulas name. hints: from the idea to nearly the code. faults: the name of an error class, perhaps with a tensor
    ("OutOfBounds X"), or "unwritten" -> the likely mistake; "wrong" -> where to look for it. outputs: their names.
    grid: the constants that an output's axes are cut by, as (rows, columns), for messages that name a tile. start: the
    hole before it is filled. share: what a thread may do, counted on the input number `counted_on`, which is small and
    ragged.
    """

    name: str
    answer: str
    inputs: Callable
    sizes: Callable
    bill: tuple[Bound, ...]
    share: tuple[Share, ...]
    hints: tuple[str, ...]
    mistakes: tuple[Mistake, ...] = ()
    faults: dict = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    grid: tuple = (None, None)
    start: tuple[str, ...] = ("pass",)
    counted_on: int = 0

    @cached_property
    def file(self):
        """The file with the hole."""
        return folder() / f"{self.name}.py"

    @cached_property
    def solution(self):
        """The text of the solution."""
        return (folder() / "solutions" / f"{self.name}.py").read_text(encoding="utf-8")

    @cached_property
    def unsolved(self):
        """The text of the exercise as it was handed out: `file` may be where a student works."""
        first = hole(self.solution)[1][0]
        indent = first[: len(first) - len(first.lstrip())]
        return with_hole(self.solution, [indent + line for line in self.start])

    @property
    def title(self):
        return self._head[2]

    @property
    def part(self):
        return self._head[3]

    @property
    def lesson(self):
        return self._head[4]

    @property
    def lines(self):
        return int(self._head[5])

    @cached_property
    def _head(self):
        return _HEAD.match(ast.get_docstring(ast.parse(self.solution)))

    def trusted(self):
        """The solution's module, loaded afresh: its `launch` and `specification` are those that judge an answer."""
        return load(folder() / "solutions" / f"{self.name}.py")

    def all_sizes(self, module, inputs):
        """What the bill's formulas name: the sizes of the inputs, and the constants of the file."""
        constants = {name: value for name, value in vars(module).items() if type(value) is int}
        return constants | self.sizes(*inputs)


def folder():
    """lessons/exercises, inside an installed package or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for parent in (package, package.parent):
        if (parent / "lessons" / "exercises").is_dir():
            return parent / "lessons" / "exercises"
    raise FileNotFoundError(f"no exercises in {package / 'lessons'} or beside the package: install numba_flash again")


def constants(name, *wanted):
    """The numbers that the file of an exercise gives these names, such as T or Br."""
    found = {}
    for node in ast.parse((folder() / "solutions" / f"{name}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            several = isinstance(target, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if several else [(target, value)]
            found |= {one.id: part.value for one, part in pairs if isinstance(part, ast.Constant)}
    return [found[name] for name in wanted]


def load(path):
    """The module of a Python file, which is run; it is in no list of modules."""
    name = f"exercise_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceFileLoader(name, str(path)))  # .PY as well
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python_lines(text):
    """The lines of a file as Python numbers them: str.splitlines ends a line at U+2028 and others, too."""
    return re.split(r"\r\n?|\n", text)


def hole(text):
    """(number of its first line, its lines) of the first hole, without the markers; None where there is none."""
    lines = python_lines(text)
    begin = next((at for at, line in enumerate(lines) if line.strip().startswith(BEGIN)), None)
    end = next((at for at, line in enumerate(lines) if line.strip().startswith(END)), None)
    if begin is None or end is None or end < begin:
        return None
    return begin + 2, lines[begin + 1 : end]


def with_hole(text, filling):
    """A file's text with other lines in its hole."""
    lines = text.splitlines()
    number, old = hole(text)
    lines[number - 1 : number - 1 + len(old)] = filling
    return "\n".join(lines) + "\n"
