"""From a recording to frames: what a person can watch of a launch, one step of the algorithm per frame.

A frame is a piece of one block between two barriers: the statements that belong to one line of the algorithm, done by
all threads. The log has them thread by thread; frames have them in the order of the source, as if all threads moved at
once. A loop is gone through turn by turn where each turn is a step of the algorithm: where it holds a barrier, or
brings both m_i and l_i up to date. All other loops are one piece.

Frames know the paper's names: m_i and l_i, O_i, S_ij and P_ij, Q, K, V, O, m, l and L, and i, j, h for query, key and
head. A kernel that calls them something else is still cut at its barriers; its row is not followed.
"""

import ast
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ..engine.access import ATOMIC, NOTE, READ, WRITE
from ..engine.rewrite import definition_in
from ..hbm.ledger import Count

PAPER_LINE = re.compile(r"# Alg\. (\d+), l\. (\d+(?: and \d+)*)")
KINDS = {READ: "read", WRITE: "written", ATOMIC: "updated"}
ROWS, COLUMNS = ("i", "row"), ("t", "col")  # what kernels call the query and the column of a thread
FOLLOWED = {(name, "global", 3) for name in "OSP"} | {(name, "global", 2) for name in "mlL"}
FOLLOWED |= {("O_i", "local", 1), ("S_ij", "shared", 2), ("P_ij", "shared", 2)}  # name, space, axes
MAX_FRAMES = 4096


@dataclass(frozen=True)
class Touch:
    """What a frame did with one array: the box lo..hi (inclusive, per axis) of the elements that it touched, how many
    they are, and in how many accesses. kind: "read", "written", "updated" (atomics). A local array has the thread as
    its first axis.
    """

    array: int
    kind: str
    lo: tuple
    hi: tuple
    elements: int
    accesses: int


@dataclass
class Frame:
    """A step of a launch. `block` (x, y, z); `phase`: barriers the block has passed; `lines` of the kernel's file that
    ran; `paper`: lines of the algorithm, from the comments; `turns`: loop variable -> (least, greatest) value over the
    threads; `queries`: (least, greatest) query that they work on, or None; `filled`: shared array -> elements that the
    block has written so far; `row`: what changed of the chosen row.
    """

    launch: int
    block: tuple
    phase: int
    lines: tuple
    paper: tuple
    turns: dict
    queries: tuple | None
    touches: list
    filled: dict
    row: dict = field(default_factory=dict)
    read_bytes: int = 0  # so far
    write_bytes: int = 0


def frames(record, row=0, head=0):
    """The frames of a Recording, and in `row` of each what it changed for query `row` of `head` -> list of Frame.

    `row` maps "m", "l" and "L" to a number, "O" to {column: number}, "S" and "P" to {key: number}, as the kernel had
    them in registers or in HBM, and "S_ij" and "P_ij" to {key, counted in the tile: number}, in shared memory.
    ValueError where there are more than MAX_FRAMES.
    """
    found = []
    for number, launch in enumerate(record.launches):
        plan = Plan(launch)
        start = 0
        for block, end in zip(launch.blocks, launch.ends, strict=True):
            found += _block(number, launch, plan, block, slice(start, end), row, head)
            start = end
            if len(found) > MAX_FRAMES:
                raise ValueError(f"{launch.kernel} has more than {MAX_FRAMES:,} steps: take larger tiles or fewer rows")
    read = written = 0
    for frame in found:
        for count in counts(record, frame).values():
            read, written = read + count.read_bytes, written + count.write_bytes
        frame.read_bytes, frame.write_bytes = read, written
    return found


def counts(record, frame):
    """{tensor: Count} of the HBM accesses of one frame."""
    arrays, found = record.launches[frame.launch].arrays, {}
    kinds = dict(zip(KINDS.values(), ("loads", "stores", "atomics"), strict=True))
    for touch in frame.touches:
        array = arrays[touch.array]
        if array.space == "global":
            one = Count(**{kinds[touch.kind]: touch.accesses}, itemsize=array.dtype.itemsize)
            found[array.name] = found.get(array.name, Count()) + one
    return found


# --- where a line of a kernel belongs ---------------------------------------------------------------------------------


class Plan:
    """The source of a kernel, cut into groups of statements. `place` maps a line to its path: the number of its group
    in each loop that is gone through turn by turn; `loops` maps the line of such a loop to its depth.
    """

    def __init__(self, launch):
        source, self.first = launch.source
        tree = definition_in("\n".join(source))
        ast.increment_lineno(tree, self.first - 1)
        self.file = launch.function.__code__.co_filename
        self.labels = labels(tuple(source), self.first)
        self.place, self.loops = {}, {}
        self.walk(tree.body, ())

    def walk(self, body, path):
        group, current, has_loop = 0, None, False
        for statement in flat(body):
            last = statement.end_lineno if not isinstance(statement, ast.If) else statement.test.end_lineno
            span = range(statement.lineno, last + 1)
            if is_stepped(statement):
                group += 1
                self.loops[statement.lineno] = len(path)
                self.place[statement.lineno] = (*path, group, 0)
                self.walk(statement.body, (*path, group))
                group, current, has_loop = group + 1, None, False
                continue
            if is_barrier(statement):
                group, current, has_loop = group + 1, None, False
                continue
            named = {label for line in span for label in self.labels.get(line, ())}
            is_loop = isinstance(statement, ast.For | ast.While)
            if (named and current and named != current) or (is_loop and not named and has_loop):
                group, has_loop = group + 1, False
            current = named or current
            has_loop |= is_loop
            for line in span:
                self.place[line] = (*path, group)


def flat(body):
    """The statements of a body, those of its branches among them."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from flat([*statement.body, *statement.orelse])


def is_barrier(node):
    return isinstance(node, ast.Expr) and ast.unparse(node.value).endswith("syncthreads()")


def is_stepped(statement):
    """Whether it is a loop each turn of which is a step of the algorithm: by a barrier, or the names m_i and l_i."""
    if not isinstance(statement, ast.For | ast.While):
        return False
    parts = list(ast.walk(statement))
    names = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return any(map(is_barrier, parts)) or {"m_i", "l_i"} <= names


@lru_cache(maxsize=64)
def labels(source, first):
    """{line: {lines of the algorithm}} from trailing comments, of the algorithm that most of them name."""
    found = {first + at: match for at, text in enumerate(source) if (match := PAPER_LINE.search(text))}
    algorithms = Counter(match[1] for match in found.values())
    main = algorithms and algorithms.most_common(1)[0][0]
    return {line: {int(n) for n in match[2].split(" and ")} for line, match in found.items() if match[1] == main}


# --- one block --------------------------------------------------------------------------------------------------------


class Events:
    """The entries of one block, thread by thread: each thread's own in the order in which it made them."""

    def __init__(self, launch, plan, part):
        order = np.argsort(launch.thread[part], kind="stable")
        for name in ("phase", "line", "array", "thread", "site", "kind", "element", "value"):
            setattr(self, name, getattr(launch, name)[part][order])
        self.size = len(order)
        new = np.ones(self.size, bool)
        new[1:] = self.thread[1:] != self.thread[:-1]
        self.start = np.maximum.accumulate(np.where(new, np.arange(self.size), 0))  # where the thread's entries begin
        own = [note.file == plan.file for note in launch.notes]
        self.notes = [note if mine else None for note, mine in zip(launch.notes, own, strict=True)]

    def noted(self, wanted):
        """Which entries are notes that `wanted(note)` is true of."""
        sites = [number for number, note in enumerate(self.notes) if note and wanted(note)]
        return (self.kind == NOTE) & np.isin(self.site, sites)

    def carried(self, is_note):
        """(the value of the last such note of the same thread at each entry, whether there is one)."""
        last = np.maximum.accumulate(np.where(is_note, np.arange(self.size), -1))
        there = last >= self.start
        return np.where(there, self.value[last], 0), there

    def turns(self, line, parent):
        """At each entry, how many turns the loop in `line` has begun since its `parent` loop's turn began."""
        begins = self.noted(lambda note: note.is_loop and note.line == line)
        total = np.cumsum(begins)
        since = self.start
        if parent is not None:
            outer = self.noted(lambda note: note.is_loop and note.line == parent)
            since = np.maximum(self.start, np.maximum.accumulate(np.where(outer, np.arange(self.size), 0)))
        return total - total[since] + begins[since]


def _block(number, launch, plan, block, part, row, head):
    events = Events(launch, plan, part)
    if not events.size:
        return []
    place, inside = frame_numbers(events, plan)
    total = place.max() + 1
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(total))
    first_phase = events.phase.min()
    lines = [[] for _ in range(total)]
    for pair in np.unique(place << 32 | events.line).tolist():
        lines[pair >> 32].append(pair & 0xFFFFFFFF)
    turns = [{} for _ in range(total)]
    for loop, entries in inside.items():
        value, there = events.carried(events.noted(lambda note, loop=loop: note.is_loop and note.line == loop))
        name = next(note.name for note in events.notes if note and note.is_loop and note.line == loop)
        for at, extent in enumerate(extents(value, entries & there, place, total)):
            if name and extent:
                turns[at][name] = extent
    queries = extents(*events.carried(events.noted(lambda note: note.name in ROWS)), place, total)
    listed, stored = touches(events, launch, place, total)
    rows = row_values(events, launch, place, total, row, head)
    written, filled = {a.name: set() for a in launch.arrays if a and a.space == "shared"}, []
    for at in range(total):
        for array in written:
            written[array] |= stored[at].get(array, set())
        filled.append({array: len(elements) for array, elements in written.items()})
    found, label = [], set()
    named = {n for group in plan.labels.values() for n in group}
    for at in range(total):
        here = [plan.labels[line] for line in lines[at] if line in plan.labels]
        paper = set().union(*here) or (named if len(named) == 1 else label)
        label = here[-1] if here else label  # what an unlabelled line after it belongs to
        phase = int(events.phase[order[starts[at]]] - first_phase)
        found.append(Frame(number, block, phase, tuple(lines[at]), tuple(sorted(paper)), turns[at], queries[at],
                           listed[at], filled[at], rows[at]))  # fmt: skip
    return found


def extents(value, there, place, total):
    """(least, greatest) `value` of the entries `there` of each frame, or None."""
    least, most = np.full(total, np.inf), np.full(total, -np.inf)
    np.minimum.at(least, place[there], value[there])
    np.maximum.at(most, place[there], value[there])
    return [(int(a), int(b)) if a <= b else None for a, b in zip(least, most, strict=True)]


def frame_numbers(events, plan):
    """The number of the frame of each entry, and {line of a stepped loop: which entries are inside it}."""
    width = max((len(path) for path in plan.place.values()), default=1)
    paths = np.zeros((max(plan.place, default=0) + 2, width), np.int64)
    for line, path in plan.place.items():
        paths[line, : len(path)] = path
    line = np.where(events.line < len(paths), events.line, 0)
    columns, inside, parents = [events.phase], {}, {}
    for loop, depth in sorted(plan.loops.items(), key=lambda item: item[1]):
        parents[loop] = next((outer for outer in parents if plan.loops[outer] == depth - 1
                              and plan.place[loop][:depth] == plan.place[outer][:depth]), None)  # fmt: skip
        prefix = plan.place[loop][:-1]
        lines = [at for at, path in plan.place.items() if len(path) > len(prefix) and path[: len(prefix)] == prefix]
        inside[loop] = np.isin(events.line, lines)
    for depth in range(width):
        columns.append(paths[line, depth])
        turns = np.zeros(events.size, np.int64)
        for loop, entries in inside.items():
            if plan.loops[loop] == depth:
                turns = np.where(entries, events.turns(loop, parents[loop]), turns)
        columns.append(turns)
    place = np.zeros(events.size, np.int64)
    for column in columns:  # numbered in lexicographic order
        present = np.zeros((place.max() + 1) * (size := column.max() - column.min() + 1), bool)
        place = place * size + column - column.min()
        present[place] = True
        place = (np.cumsum(present) - 1)[place]
    return place, inside


def touches(events, launch, place, total):
    """For each frame its Touches, and {shared array: elements written}."""
    listed, written = [[] for _ in range(total)], [{} for _ in range(total)]
    at = np.flatnonzero(events.kind != NOTE)
    group = (place[at] * len(launch.arrays) + events.array[at]) * len(KINDS) + events.kind[at]
    order = np.lexsort((events.element[at], group))
    group, element = group[order], events.element[at][order]
    starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]][: len(group)])
    for start, end in zip(starts, [*starts[1:], len(group)], strict=True):
        rest, kind = divmod(int(group[start]), len(KINDS))
        frame, number = divmod(rest, len(launch.arrays))
        array = launch.arrays[number]
        elements = np.unique(element[start:end])
        shape = (int(np.prod(launch.block)), *array.shape) if array.space == "local" else array.shape
        index = np.unravel_index(elements, shape)
        lo, hi = (tuple(int(f(axis)) for axis in index) for f in (np.min, np.max))
        listed[frame].append(Touch(number, KINDS[kind], lo, hi, len(elements), int(end - start)))
        if array.space == "shared" and kind != READ:
            written[frame].setdefault(array.name, set()).update(elements.tolist())
    return listed, written


# --- one row ----------------------------------------------------------------------------------------------------------


def row_values(events, launch, place, total, row, head):
    """For each frame what it changed for query `row` of `head`, see `frames`."""
    rows = [{} for _ in range(total)]

    def enter(at, key, value, column=None):
        if column is None:
            rows[at][key] = value
        else:
            rows[at].setdefault(key, {})[column] = value

    query, has_row = events.carried(events.noted(lambda note: note.name in ROWS))
    its_head, has_head = events.carried(events.noted(lambda note: note.name == "h"))
    mine = has_row & (query == row) & (~has_head | (its_head == head))
    names = {a.name: a for a in launch.arrays if a and a.space == "global"}
    scalars = {"m_i": "m", "m": "m", "l_i": "l", "l": "l"}
    column = None
    if "O" in names:
        scalars["acc"] = "O"
        column, has_column = events.carried(events.noted(lambda note: note.name in COLUMNS and not note.is_loop))
    for name, key in scalars.items():
        for at in np.flatnonzero(mine & events.noted(lambda note, name=name: note.name == name)):
            if key != "O":
                enter(place[at], key, float(events.value[at]))
            elif has_column[at] and column[at] < names["O"].shape[-1]:
                enter(place[at], "O", float(events.value[at]), int(column[at]))
    for number, array in enumerate(launch.arrays):
        if array is None or (array.name, array.space, len(array.shape)) not in FOLLOWED:
            continue
        writes = (events.kind == WRITE) & (events.array == number)
        if array.space == "global":
            index = np.unravel_index(events.element * writes, array.shape)
            for at in np.flatnonzero(writes & (index[0] == head) & (index[1] == row)):
                enter(place[at], array.name, float(events.value[at]), int(index[2][at]) if len(index) > 2 else None)
        elif array.space == "local":
            for at in np.flatnonzero(writes & mine):
                enter(place[at], "O", float(events.value[at]), int(events.element[at] % array.shape[0]))
        else:
            first = events.line[writes].min(initial=2**31)
            for at in np.flatnonzero(writes & mine):
                index = np.unravel_index(events.element[at], array.shape)
                name = array.name if events.line[at] == first else "P_ij"  # which takes the place of S_ij
                enter(place[at], name, float(events.value[at]), int(index[array.name == "P_ij"]))
    return rows
