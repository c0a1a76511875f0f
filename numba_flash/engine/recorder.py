"""What a kernel does, entry by entry: `with recording() as record:` keeps every access of each launch, on the CPU.

The kernel stays as it is. In a recording the engine rewrites it once more, so that it also notes each value that it
assigns to a name and each turn of its loops; and its arrays, shared and local ones too, are of a type whose accesses
leave an entry in a log. Blocks run one after another, and the log is emptied after each. Everything else is arithmetic
on the entries afterwards, in NumPy. A launch outside of a recording compiles and runs what it did before.
"""

import ast
import inspect
import textwrap
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..opened import Opened
from . import access
from .rewrite import STATE, FunctionRewriter, call

LIMIT = 2**22  # entries of a recording, 32 bytes each
PATIENCE = 16  # times that many are counted before the launch is stopped


@dataclass(frozen=True)
class Note:
    """A place in the source where `name` is assigned, or where a loop's next turn begins (`is_loop`)."""

    file: str
    line: int
    name: str
    is_loop: bool = False


class RecordingRewriter(FunctionRewriter):
    """The rewriter of a kernel that is recorded. Of device functions it notes no names: they can be many."""

    def __init__(self, writer, function, host=None, prefix=""):
        super().__init__(writer, function, host, prefix)
        self.notes_names = host is not None  # written into a kernel
        self.kernel_line = host.kernel_line if host else None  # of the statement that is being rewritten

    def body(self, kernel):
        self.notes_names = kernel
        return super().body(kernel)

    def mark(self, node):
        if self.host is None:
            self.kernel_line = self.line(node)
        return [ast.Expr(call("mark", self.use(STATE), ast.Constant(self.kernel_line)))] if self.notes_names else []

    def note(self, node, name, is_loop=False):
        notes = self.program.notes
        notes.append(Note(self.file, self.line(node), name, is_loop))
        value = ast.Name(self.prefix + name, ast.Load()) if name else ast.Constant(0)
        return ast.Expr(call("note", self.use(STATE), ast.Constant(len(notes) - 1), value))

    def block(self, statements):
        result = []
        for statement in statements:
            marks = self.mark(statement)
            result += [*marks, *super().block([statement]), *self.assigned(statement)]
        return result

    def assigned(self, statement):
        """A note for each plain name that an assignment assigns."""
        if not self.notes_names or not isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
            return []
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [part.id for target in targets for part in ast.walk(target)
                 if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]  # fmt: skip
        return [self.note(statement, name) for name in names if getattr(statement, "value", None) is not None]

    def visit_Expr(self, node):
        """After a barrier other threads have run: what follows in the same line is marked again."""
        new = super().visit_Expr(node)
        is_barrier = isinstance(new, ast.Expr) and isinstance(new.value, ast.Yield)
        return [new, *self.mark(node)] if is_barrier else new

    def turn(self, node, loop):
        """The loop with a note at the start of each turn, before its check of whether to stop."""
        if self.notes_names:
            name = node.target.id if isinstance(node, ast.For) and isinstance(node.target, ast.Name) else ""
            loop.body[:0] = [*self.mark(node), self.note(node, name, is_loop=True)]
        return loop

    def visit_For(self, node):
        return self.turn(node, super().visit_For(node))

    def visit_While(self, node):
        return self.turn(node, super().visit_While(node))


@dataclass(frozen=True)
class RecordedArray:
    """An array of a kernel: `space` "global", "shared" or "local" (one for each thread, of that shape)."""

    name: str
    space: str
    shape: tuple
    dtype: np.dtype

    @property
    def nbytes(self):
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass
class Launch:
    """One recorded launch, and its entries in the order in which they came: block by block, in each phase thread by
    thread. A phase is the time between two barriers of one block; phases are numbered over the whole launch.
    """

    kernel: str
    function: object
    grid: tuple
    block: tuple
    arrays: list  # of RecordedArray, by the number that entries give; None for an argument that is a number
    sites: list  # of rewrite.Site
    notes: list  # of Note
    blocks: list  # (x, y, z) of each block, as they ran
    ends: list  # for each of them, how many entries there were when it was done
    words: np.ndarray  # the log: see access.py

    phase = cached_property(lambda self: self.words[:, 0] >> 32)
    line = cached_property(lambda self: self.words[:, 0] & 0xFFFFFFFF)  # of the kernel's file, 1 is the first
    array = cached_property(lambda self: self.words[:, 1] >> 48)  # number in `arrays`; of a note 0
    thread = cached_property(lambda self: self.words[:, 1] >> 32 & 0xFFFF)
    site = cached_property(lambda self: self.words[:, 1] >> 3 & 0x1FFFFFFF)  # number in `sites`, or in `notes`
    kind = cached_property(lambda self: self.words[:, 1] >> 1 & 3)  # access.READ, WRITE, ATOMIC or NOTE
    element = cached_property(lambda self: self.words[:, 2])  # of a local array: thread · size + element

    @cached_property
    def value(self):
        """What was read, written or assigned, float64 (exact for all but integers beyond 2⁵³); of an atomic 0."""
        is_float = self.words[:, 1] & 1
        bits = np.ascontiguousarray(self.words[:, 3])
        return np.where(is_float == 1, bits.view(np.float64), bits.astype(np.float64))

    @cached_property
    def source(self):
        """(lines of the kernel's source, the number of the first one)."""
        lines, first = inspect.getsourcelines(self.function.__code__)
        return textwrap.dedent("".join(lines)).splitlines(), first

    @property
    def shared_bytes(self):
        return sum(array.nbytes for array in self.arrays if array and array.space == "shared")


class Recording:
    """The launches of a `recording()`, in order."""

    def __init__(self):
        self.launches = []

    def __repr__(self):
        names = ", ".join(launch.kernel for launch in self.launches) or "none"
        launches = "launch" if len(self.launches) == 1 else "launches"
        return f"Recording of {len(self.launches)} {launches} ({names}), {self.entries:,} entries"

    @property
    def entries(self):
        return sum(len(launch.words) for launch in self.launches)


_open = Opened("recordings")


def recording():
    """Record every launch in the body, on the CPU engine: `with recording() as record: ...` -> Recording.

    Recordings nest, and each thread has its own. In the body kernels run on the CPU engine where nobody names a device.
    A launch on another device or in strict mode, and one whose arguments are not contiguous, is refused (ValueError),
    and so is one of more entries than LIMIT.
    """
    return _open(Recording())


def active():
    """Whether a recording is open in this thread."""
    return bool(_open)


def check(kernel, names, args, strict):
    """ValueError for a launch that cannot be recorded."""
    if strict:
        raise ValueError(f"strict=True (or NUMBA_FLASH_STRICT=1): {kernel} is being recorded, and a recording does not "
                         "look for races: leave one of the two out")  # fmt: skip
    for name, value in zip(names, args, strict=True):
        if isinstance(value, np.ndarray) and not value.flags.c_contiguous:
            raise ValueError(f"argument {name} of {kernel} is not contiguous, which a recording cannot follow: "
                             f"pass np.ascontiguousarray({name})")  # fmt: skip


def arrays(program, args, memory):
    """What the arrays of a launch are, by their number in the log: arguments (None for a number), shared, local."""
    found = [(isinstance(value, np.ndarray) and RecordedArray(name, "global", value.shape, value.dtype)) or None
             for name, value in zip(program.parameters, args, strict=True)]  # fmt: skip
    hidden = [(array.name, "shared") for array in program.shared.values()]
    hidden += [(array.name, "local") for array in program.local.values()]
    for (name, space), tensor in zip(hidden, memory, strict=True):
        data = tensor.keep_alive[0]
        found.append(RecordedArray(name, space, data.shape[space == "local" :], data.dtype))
    return found


class Recorder:
    """Keeps the log of one launch, which is as long as what the open recordings still take."""

    def __init__(self, program, state, blocks):
        room = LIMIT - max(record.entries for record in _open)
        self.program, self.words, self.blocks = program, state.words, blocks
        self.log, self.ends = np.empty((room, access.ENTRY_WORDS), np.int64), []
        self.make_room(0)

    def make_room(self, used):
        """The next block's entries go behind those of the blocks before."""
        left = self.log[used:]
        self.words[access.LOG], self.words[access.LOG_SIZE], self.words[access.LOGGED] = left.ctypes.data, len(left), 0
        self.words[access.LOG_LIMIT] = PATIENCE * LIMIT

    def take(self):
        """Keep what the last block has logged. ValueError where there was more than room for."""
        logged, room = int(self.words[access.LOGGED]), int(self.words[access.LOG_SIZE])
        if logged > room:
            more = "more than " * (logged > PATIENCE * LIMIT)
            raise ValueError(
                f"{self.program.name} is too much to record: block {len(self.ends) + 1:,} of {len(self.blocks):,} has "
                f"{more}{logged:,} accesses and assignments, and of the {LIMIT:,} of a recording {room:,} are left: "
                "launch it on fewer rows or columns"
            )
        self.ends.append(len(self.log) - room + logged)
        self.make_room(self.ends[-1])

    def end(self, function, grid, block, arrays):
        """Enter the launch in every open recording."""
        words = self.log[: self.ends[-1]].copy()
        launch = Launch(self.program.name, function, grid, block, arrays, self.program.sites, self.program.notes,
                        self.blocks, self.ends, words)  # fmt: skip
        for record in _open:
            record.launches.append(launch)
