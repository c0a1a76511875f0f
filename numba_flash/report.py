"""Everything a lesson prints: bills, bars, tile maps, tables and prose, with or without colour and Unicode.

`console()` gives the one kind of console; `bill_table`, `bars` and the others give what its `print` takes.
"""

import contextlib
import math
import re
import shutil
import sys
import textwrap
import threading
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from io import StringIO
from itertools import zip_longest
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from .hbm.ledger import KINDS, Count

WIDTH = 80
NARROW = 16  # columns that code has at least, if it reaches beyond the terminal
ACCENT = "color(31)"
LIT = "color(166)"
WRONG = "bold color(167)"

CONVENTION = (
    "One access of one element of a kernel argument by one thread = one load or store. Shared memory and registers are "
    "free. {what} is what the threads request; caches make the traffic in the HBM chips differ."
)
ATOMICS = " An atomic has a row of its own, and is one read and one write."
MEASURED = (
    "L1 counts the sectors of 32 bytes that the requests of a warp touch: less than predicted where threads of a warp "
    "ask for the same element, more where a sector is used in part. L2 has what L1 does not answer, and all stores. "
    "DRAM moves less where L2 answers, and what is stored may still be in L2 when the kernel ends. ncu empties the "
    "caches before each kernel: what one leaves in L2 does not help the next."
)
MEASURED_ATOMICS = " Atomics are left out of predicted and L1 here: L2 carries them out."

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀᵈⁿⁱ", "0123456789+-Tdni", strict=True))
_ASCII = {
    "⌈": "ceil(", "⌉": ")", "⌊": "floor(", "⌋": ")", "√": "sqrt", "×": "x", "∘": "*", "⊙": "*", "−": "-", "–": "-",
    "—": "-", "‑": "-", "±": "+/-", "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "→": "->", "←": "<-", "↔": "<->",
    "⇒": "=>", "∞": "inf", "∑": "sum ", "∏": "prod ", "∂": "d", "∇": "grad ", "∈": "in", "…": "...", "“": '"',
    "”": '"', "‘": "'", "’": "'", "•": "*", "°": " deg", "✓": "ok", "✗": "x", "█": "#", "■": "#", "▒": ":", "░": ".",
    "─": "-", "━": "-", "│": "|", "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "eps",
    "θ": "theta", "λ": "lambda", "µ": "u", "μ": "u", "π": "pi", "σ": "sigma", "τ": "tau", "Δ": "Delta",
    "Θ": "Theta", "Σ": "Sigma", "Ω": "Omega", "\u0303": "~",
}  # fmt: skip


def to_ascii(text):
    """`text` in ASCII: N² is N^2, Kᵀ K^T, ⌈x⌉ ceil(x), √x sqrt(x), N·d (a tight dot) N*d and a spaced dot a dash.

    N²d is N^2*d, because N^2d would read as N to the power 2d.
    """
    if text.isascii():
        return text
    text = re.sub(r"(?<=\S)·(?=\S)", "*", text).replace("·", "-")
    text = re.sub(r"√(\w+)", r"sqrt(\1)", text)
    high = "".join(_SUPERSCRIPTS)
    text = re.sub(rf"([{high}])(?=[^\W{high}]|[(⌈⌊])", r"\1*", text)
    text = re.sub(f"[{high}]+", lambda m: "^" + "".join(map(_SUPERSCRIPTS.get, m[0])), text)
    text = re.sub("[₀-₉]+", lambda m: "_" + unicodedata.normalize("NFKD", m[0]), text)
    text = unicodedata.normalize("NFKD", "".join(_ASCII.get(c, c) for c in text)).replace("⁄", "/")
    return "".join(c for c in text if not unicodedata.combining(c)).encode("ascii", "replace").decode()


class _AsciiFile:
    """A stream that gets ASCII alone, whatever is written."""

    def __init__(self, file):
        self.file = file

    def write(self, text):
        self.file.write(to_ascii(text))

    def __getattr__(self, name):
        return getattr(self.file, name)


class _Console(Console):
    def render_str(self, text, **how):
        return super().render_str(text if self.encoding.startswith("utf") else to_ascii(text), **how)


def console(file=None):
    """The console of a lesson, writing to `file` (default: standard output).

    As wide as the terminal, 100 columns at most; 80 and no control codes where `file` is no terminal. A notebook gets
    80 columns and colours. NO_COLOR is honoured. ASCII alone where the encoding of `file` is not UTF-8. Strings print
    as they are: brackets are no markup.
    """
    out = sys.stdout if file is None else file
    notebook = file is None and type(out).__module__.startswith("ipykernel")
    terminal = bool(getattr(out, "isatty", lambda: False)())
    ascii_only = not (getattr(out, "encoding", None) or "utf-8").lower().startswith("utf")
    return _Console(
        file=_AsciiFile(out) if ascii_only else file,
        width=min(shutil.get_terminal_size().columns, 100) if terminal else WIDTH,
        force_terminal=terminal or notebook,
        force_jupyter=False,  # which would put each line into a frame of its own
        color_system="256" if notebook else "auto",
        markup=False,
        highlight=False,
        emoji=False,
    )


def to_text(renderable):
    """What `print` shows of `renderable` on a console 80 columns wide -> str, without colour."""
    file = StringIO()
    console(file).print(renderable)
    return file.getvalue().rstrip("\n")


class Drawing:
    """What rich prints from `draw(width, clean)` -> lines, each a list of (text, style) pieces or strings.

    `width` is in columns; `clean` is what every text that may not be ASCII has to pass before it is laid out.
    """

    def __init__(self, draw):
        self.draw = draw

    def __rich_console__(self, console, options):
        for line in self.draw(options.max_width, to_ascii if options.ascii_only else str):
            yield Text.assemble(*line, overflow="fold")


def in_bytes(number):
    """Bytes for reading, in powers of 1000: 88.3 MB."""
    if number >= 10**24:
        return f"{Decimal(number):.3g} B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(number) < 999.5 or unit == "PB":
            break
        number /= 1000
    digits = 0 if unit == "B" or abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    return f"{number:,.{digits}f} {unit}"


def _figure(value):
    if isinstance(value, str):
        return value
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.1f}" if 100 <= abs(value) < 1e9 else f"{value:.3g}"


def _ratio(value, to):
    if not to:
        return "new" if value else "-"
    ratio = value / to
    if ratio and ratio < 1e-3:
        return f"{ratio:.1e}"
    return f"{(20_000 * value + to) // (2 * to) / 10_000:.4f}" if ratio < 100 else f"{ratio:,.0f}"  # a half goes up


def heading(title, facts=""):
    """The first line of a lesson: its title, and the sizes it runs at."""

    def draw(width, clean):
        left, right = clean(title), clean(facts)
        if max(len(left) + 4, 33) + len(right) + 1 <= width:
            yield [(f" {left:<32} ", "bold"), right] if right else [(f" {left}", "bold")]
        else:
            yield [(f" {left}", "bold")]
            yield [f" {right}"]

    return Drawing(draw)


def prose(text):
    """Paragraphs, wrapped. Indented lines stay as they are; `code` in backquotes is coloured."""

    def draw(width, clean):
        for paragraph in re.split(r"\n\s*\n", clean(textwrap.dedent(text).strip("\n"))):
            for run in re.findall(r"(?:^[ \t]+\S.*\n?)+|(?:^\S.*\n?)+", paragraph, flags=re.MULTILINE):
                indented = run[0].isspace()
                flowing = " ".join(run.split())
                for line in hanging(run.splitlines(), width - 1) if indented else textwrap.wrap(flowing, width - 2):
                    yield [" ", *((part, ACCENT if part[:1] == "`" else "") for part in re.split("(`[^`]+`)", line))]
            yield []

    return Drawing(draw)


def hanging(lines, width):
    """Lines as they are, but what is too long for `width` goes on further to the right than it began."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        yield from [line] if len(line) <= width else wrapped(line, width, subsequent_indent=indent)


def cut(line, room):
    """A line of source for `room` columns: its comment is whole or absent, and code that is too long ends in "..."."""
    if len(line) > room:
        line = re.sub(r"(?<=\S)\s+#", "  #", line)
    if len(line) > room:
        line = re.sub(r"(?<=\S)\s+#.*", "", line)
    return line if len(line) <= room else line[: room - 3].rstrip() + "..."


def table(header, rows):
    """A small table: numbers to the right with thousands separators, strings to the left, the last column wrapped."""
    rows = [list(row) for row in rows]
    if any(len(row) != len(header) for row in rows):
        raise ValueError(f"rows={rows!r:.80}: each needs {len(header)} cells, one for each of header={header!r}")

    def draw(width, clean):
        numeric = [all(not isinstance(row[c], str) for row in rows) for c in range(len(header))]
        cells = [[clean(_figure(cell)) for cell in row] for row in [header, *rows]]
        sizes = [max(len(row[c]) for row in cells) for c in range(len(header))]
        room = max(width - 1 - sum(size + 2 for size in sizes[:-1]), 16)
        for number, row in enumerate(cells):
            wrapped = textwrap.wrap(row[-1], room) or [""]
            start = "".join(
                f"{x:>{n}}  " if r else f"{x:<{n}}  " for x, n, r in zip(row[:-1], sizes, numeric, strict=False)
            )
            last = f"{wrapped[0]:>{sizes[-1]}}" if numeric[-1] else wrapped[0]
            yield [(f" {start}{last}".rstrip(), "bold" if number == 0 else "")]
            yield from ([" " * (len(start) + 1) + more] for more in wrapped[1:])

    return Drawing(draw)


def bill_table(
    counted=None, *, predicted=None, previous=None, algorithm0=None, ideal="Algorithm 0", below=None, convention=True
):
    """One bill by kernel and tensor: predicted, counted, their difference, and the quotient by the stage before.

    `counted` and `predicted` are Bills, of which one may be missing; `previous` is (name, Bill) of the stage before;
    `algorithm0` is the Bill of the yardstick, called `ideal`. A kernel that the stage before does not have is compared
    with all that stage's accesses to the tensor of the same name. `below` is an `error_line` that belongs to the bill.
    The ledger's convention stands under it all, unless `convention` is False.
    """
    bills = {name: bill for name, bill in (("predicted", predicted), ("counted", counted)) if bill is not None}
    if not bills:
        raise ValueError("counted=None and predicted=None leave nothing to show: pass one of them, or both")
    shown = list(bills.values())[-1]
    rows = _bill_rows(list(bills.values()), previous)
    heads = [*bills, *["difference"] * (len(bills) - 1), *([f"/ {previous[0]}"] if previous else [])]
    gone = _gone(shown, *previous) if previous else ""
    explained = CONVENTION.format(what="Counted" if counted is not None else "Predicted")
    explained += ATOMICS * any(bill.atomics for bill in bills.values())

    def draw(width, clean):
        for gap, stacked, brief in ((2, False, 0), (2, False, 1), (1, False, 0), (1, False, 2), (1, True, 2)):
            lines = list(_bill_lines(rows, heads, gap, stacked, brief, algorithm0, ideal))
            if max(sum(len(text) for text, _ in line) for line in lines) <= width:
                break
        yield [f" HBM bill in elements{_bytes_each(shown)}, as the threads request them"]
        yield from lines
        yield from ([f" {clean(line)}"] for line in textwrap.wrap(gone, width - 2))
        if below:
            yield from below.draw(width, clean)
        if convention:
            yield []
            yield from ([f" {line}"] for line in textwrap.wrap(explained, width - 2))

    return Drawing(draw)


def measured_table(measured, *, predicted):
    """What the hardware moved, kernel by kernel and in bytes, below what the Bill `predicted` says of it.

    `measured` is what `hbm.profiler.measure` gives. Loads and stores alone are predicted here: atomics are not in L1's.
    """
    pairs = ("predicted", "loads", "stores"), ("L1", "l1_loads", "l1_stores"), ("DRAM", "dram_read", "dram_written")
    moved = {}
    for kernel, found in measured.items():
        counts = predicted.kernels.get(kernel, {}).values()
        moved[kernel] = found | {kind: sum(getattr(c, kind) * c.itemsize for c in counts) for kind in KINDS}
    if len(moved) > 1:
        moved["total"] = {name: sum(one[name] for one in moved.values()) for name in next(iter(moved.values()))}
    rows = []
    for kernel, found in moved.items():
        first, L1, DRAM = ((what, found[a], found[b], found[a] + found[b]) for what, a, b in pairs)
        rows += [(kernel, *first), ("", *L1), ("", "L2", None, None, found["l2"]), ("", *DRAM)]
    explained = MEASURED + MEASURED_ATOMICS * bool(predicted.atomics)

    def lines(number):
        """The cells, with each number as `number` writes it."""
        yield "", "", "loads", "stores", "both", "/ predicted"
        base = 0
        for kernel, what, *values in rows:
            base = values[-1] if what == "predicted" else base
            ratio = "" if what == "predicted" else f"{values[-1] / base:.3g}" if base else "-"
            yield kernel, what, *("" if value is None else number(value) for value in values), ratio

    def draw(width, clean):
        for number in ("{:,}".format, in_bytes):
            cells = list(lines(number))
            sizes = [max(map(len, column)) for column in zip(*cells, strict=True)]
            if sum(sizes) + 2 * len(sizes) - 1 <= width:
                break
        yield [" Bytes that the hardware moved, as Nsight Compute measured them"]
        for row, (kernel, what, *numbers) in enumerate(cells):
            name = f"{kernel:<{sizes[0]}}  ", ACCENT
            rest = "".join(f"  {cell:>{size}}" for cell, size in zip(numbers, sizes[2:], strict=True))
            yield [" ", name, (f"{what:<{sizes[1]}}{rest}".rstrip(), "" if row else "bold")]
        yield []
        yield from ([f" {line}"] for line in textwrap.wrap(explained, width - 2))

    return Drawing(draw)


class _Row(NamedTuple):
    kernel: str
    tensor: str
    kind: str
    numbers: list
    cells: list
    notes: list


def _bill_rows(bills, previous):
    """A row for each kernel, tensor and kind that a bill has; the last row is the total."""

    def row(kernel, tensor, kind, numbers, before, notes=()):
        off = numbers[-1] - numbers[0]
        cells = [f"{number:,}" for number in numbers] + [f"{off:+,}" if off else "0"] * (len(bills) - 1)
        cells += [_ratio(numbers[-1], before)] if previous else []
        return _Row(kernel, tensor, kind, numbers, cells, [*notes, *["differs"] * bool(off)])

    kernels = {}
    for bill in reversed(bills):
        for kernel, tensors in bill.kernels.items():
            kernels.setdefault(kernel, {}).update(dict.fromkeys(tensors))
    rows = []
    for kernel, tensor in ((kernel, tensor) for kernel, tensors in kernels.items() for tensor in tensors):
        counts = [bill.kernels.get(kernel, {}).get(tensor, Count()) for bill in bills]
        for kind in KINDS:
            numbers = [getattr(count, kind) for count in counts]
            if any(numbers):
                before = 0
                if previous:
                    there = previous[1].kernels
                    among = [there[kernel]] if kernel in there else there.values()
                    before = sum(getattr(tensors[tensor], kind) for tensors in among if tensor in tensors)
                sizes = {count.itemsize for count in counts if count.elements}
                rows.append(row(kernel, tensor, kind, numbers, before, ["bytes differ"] * (len(sizes) - 1)))
    before = previous[1].elements if previous else 0
    total = row("total", "", "", [bill.elements for bill in bills], before, [in_bytes(bills[-1].total_bytes)])
    return [*rows, total]


def _bill_lines(rows, heads, gap, stacked, brief, algorithm0, name):
    """The bill in columns `gap` apart; `stacked`: kernels on their own lines; `brief`: 1 short heads, 2 also rounded
    differences and one note per line.
    """
    *body, total = rows
    kernel, tensor, kind = (max((len(row[part]) for row in body), default=0) for part in range(3))
    ideal = name if stacked else f"{name}, ideal"
    first = 2 if stacked else kernel + 2
    left = max(first + tensor + 2 + kind, len(ideal) if algorithm0 is not None else len("total"))
    columns = [heads, *(row.cells for row in rows)]
    short = (0, 1, len(columns))[brief]
    columns[:short] = [[*map(_brief, cells)] for cells in columns[:short]]
    sizes = [max(map(len, column)) for column in zip(*columns, strict=True)]
    space = " " * gap

    def figures(cells):
        return "".join(f"{space}{cell:>{size}}" for cell, size in zip(cells, sizes, strict=True))

    def notes(row):
        return "".join(space + note for note in (row.notes[-1:] if brief > 1 else row.notes))

    yield [(" " * (left + 1) + figures(columns[0]), "bold")]
    above = ("", "")
    for row, cells in zip(body, columns[1:], strict=False):
        new = row.kernel != above[0]
        if stacked and new:
            yield [(f" {row.kernel}", ACCENT)]
        start = row.kernel if new and not stacked else ""
        name = "" if above == row[:2] else row.tensor
        above = row[:2]
        style = WRONG if row.notes else ""
        yield [
            (f" {start:<{first}}", ACCENT),
            (f"{name:<{tensor}}  {row.kind}".ljust(left - first), ""),
            (figures(cells), style),
            (notes(row), style),
        ]
    style = WRONG if "differs" in total.notes else "bold"
    yield [(f" {'total':<{left}}{figures(columns[-1])}{notes(total)}", style)]
    if algorithm0 is not None:
        elements = total.numbers[-1]
        times = f"this stage: {elements / algorithm0.elements:.3g} times ideal" if algorithm0.elements else ""
        yield [(f" {ideal:<{left}}{space}{algorithm0.elements:>{sizes[0]},}   {times}".rstrip(), "")]


def _brief(cell):
    """A difference of more than 8 characters rounded, a head of more than 9 in short."""
    if cell[:1] in "+-" and len(cell) > 8:
        return f"{int(cell.replace(',', '')):+.1e}"
    if len(cell) > 9 and cell[:2] == "/ ":
        return "/ before"
    return "diff" if cell == "difference" else cell


def _bytes_each(bill):
    sizes = sorted(
        {count.itemsize for tensors in bill.kernels.values() for count in tensors.values() if count.elements}
    )
    return f" of {' and '.join(map(str, sizes))} bytes" if sizes else ""


def _gone(bill, name, before):
    """What the stage before accessed and `bill` does not: the items that this stage deletes."""

    def tensors(bill):
        return {
            f"{tensor} {kind}": None
            for tensors in bill.kernels.values()
            for tensor, count in tensors.items()
            for kind in KINDS
            if getattr(count, kind)
        }

    gone = [item for item in tensors(before) if item not in tensors(bill)]
    return f"gone since {name}: {', '.join(gone)}" if gone else ""


def error_line(error, *, naive=None, bound=None):
    """max|error| against float64, what it is compared with, and WRONG where it is beyond `bound`.

    With `naive`, the naive kernel's own error, `bound` is `testing.bound` and what is within it is exact. Without, it
    is a worst case such as `testing.naive_bound`, which an error within it does not turn into "exact".
    """
    return Drawing(lambda width, clean: [_error_pieces("error", error, naive, bound)])


def gradient_error_lines(errors):
    """The same for gradients, a line each: `errors` maps a name to (error, naive or None, bound or None)."""
    return Drawing(
        lambda width, clean: [_error_pieces(f"error of {name}", *figures) for name, figures in errors.items()]
    )


def _error_pieces(what, error, naive, bound):
    pieces = [(f" {what} against float64  {error:.1e}", "")]
    if naive is not None:
        pieces.append((f"    naive's own  {naive:.1e}", ""))
    if bound is not None and naive is None:
        pieces.append((f"    worst case of rounding  {bound:.1e}", ""))
        pieces += [] if error <= bound else [("    WRONG", WRONG)]
    elif bound is not None:
        pieces.append(("    exact", "") if error <= bound else (f"    WRONG (bound {bound:.1e})", WRONG))
    return pieces


def bars(values, unit=""):
    """A bar for each label of `values` (0 or more), the longest as wide as there is room; "bytes" read as MB, GB."""
    for label, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"values[{label!r}]={value!r} has no bar: pass finite numbers of 0 or more")

    def draw(width, clean):
        labels = [clean(str(label)) for label in values]
        ends = [in_bytes(v) if unit == "bytes" else clean(f"{_figure(v)} {unit}".rstrip()) for v in values.values()]
        named, figured = (max(map(len, texts), default=0) for texts in (labels, ends))
        room = max(width - named - figured - 5, 8)
        top = max(values.values(), default=0)
        for label, end, value in zip(labels, ends, values.values(), strict=True):
            bar = bar_of(value / top * room, clean is to_ascii) if value else ""
            yield [f" {label:<{named}}  ", (bar, ACCENT), " " * bool(bar) + end]

    return Drawing(draw)


def bar_of(length, ascii_only):
    if ascii_only:
        return "#" * max(round(length), 1)
    eighths = max(round(length * 8), 1)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def source_lines(lines, number, width, *, margin=None, below=None):
    """Source lines with numbers, `number` the first's; comments beside their lines, most of them in one column.

    A comment that would take more than two lines there stands above its line, behind the number of that line.

    margin: what stands left of the number of a line, as a function of it -> pieces (text, style), or None for a line
    without. below: what stands under a line, as a function of its number -> strings. ASCII is the caller's care.
    """
    parts = [re.fullmatch(r"(.*?)\s*(#.*)?", line).groups(default="") for line in lines]
    digits = len(str(number + len(lines)))
    left = [(margin(at) if margin else None) or [] for at in range(number, number + len(lines))]
    room = max((sum(len(text) for text, _ in pieces) for pieces in left), default=0)
    gutter = room + digits + 3
    beside = [(gutter + len(code) + 2, comment) for code, comment in parts if code and comment]
    column = min(
        sorted(start for start, _ in beside),
        key=lambda column: sum(_comment_place(*line, column, width)[0] for line in beside),
        default=0,
    )
    for at, (code, comment) in enumerate(parts, number):
        pieces = left[at - number] or [(" " * room, "")]
        start = Text.assemble(*pieces, (f" {at:>{digits}}  ", "dim"))
        if not code:
            text = lines[at - number].rstrip()
            indent = " " * (len(text) - len(text.lstrip()))
            first, *rest = wrapped(text, width - gutter, subsequent_indent=f"{indent}# ") or [""]
            yield Text.assemble(start, (first, ACCENT))
            yield from (Text.assemble(" " * gutter, (more, ACCENT)) for more in rest)
            continue
        indent = len(code) - len(code.lstrip())
        first, *rest = wrapped(code, width - gutter, subsequent_indent=" " * (indent + 8), break_long_words=False)
        last = len(rest[-1] if rest else first)
        _, place, notes = _comment_place(gutter + last + 2, comment, 0 if rest else column, width)
        if comment and not notes:
            above = wrapped(f"# {at}: {comment[1:].strip()}", width - gutter - indent, subsequent_indent="# ")
            yield from (Text.assemble(" " * (gutter + indent), (note, ACCENT)) for note in above)
        pieces = [*(Text.assemble(start if more is first else " " * gutter, more) for more in (first, *rest))]
        if notes:
            pieces[-1] = Text.assemble(pieces[-1], " " * (place - gutter - last), (notes[0], ACCENT))
        yield from pieces
        yield from (Text.assemble(" " * place, (note, ACCENT)) for note in notes[1:])
        place = gutter + indent
        for text in below(at) if below else ():
            yield from (Text(" " * place + line) for line in wrapped(text, width - place, subsequent_indent="   "))


def wrapped(text, width, **how):
    """textwrap.wrap, also where a terminal is too narrow for what stands left of the text."""
    return textwrap.wrap(text, max(width, NARROW), **how)


def _comment_place(start, comment, column, width):
    """Where a comment stands that may begin at `start` -> (what is lost by that, its place, its lines; [] is above)."""
    if not comment:
        return 0, start, []
    if start <= column < width:
        notes = textwrap.wrap(comment, width - column, subsequent_indent="# ")
        if len(notes) <= 2:
            return len(notes), column, notes
    if start + len(comment) <= width:
        return 2, start, [comment]
    return 4, 0, []


@dataclass(frozen=True)
class Tiles:
    """One matrix of `tile_map`: `rows` × `columns` tiles, of which those in `lit`, (row, column) pairs, are lit."""

    name: str
    rows: int
    columns: int
    lit: Iterable
    caption: str = ""

    def __post_init__(self):
        object.__setattr__(self, "lit", frozenset((int(r), int(c)) for r, c in self.lit))
        outside = sorted((r, c) for r, c in self.lit if not (0 <= r < self.rows and 0 <= c < self.columns))
        if outside:
            raise ValueError(f"lit={outside[0]} is outside the {self.rows} x {self.columns} tiles of {self.name}")


def tile_map(*tiles, beside=3):
    """The matrices `tiles` as grids of cells, lit or not, `beside` of them side by side, captions below.

    A matrix of more tiles than there is room for is drawn coarser: a cell is lit where one of its tiles is, and the
    caption says how many tiles a cell holds.
    """

    def draw(width, clean):
        columns = min(len(tiles), beside)
        room = max((width - 1 - 3 * (columns - 1)) // max(columns, 1), 10)
        lit, unlit = ("#", ".") if clean is to_ascii else ("■", "·")
        grids = [_grid(matrix, lit, unlit, clean, room) for matrix in tiles]
        for start in range(0, len(grids), beside):
            for texts in zip_longest(*grids[start : start + beside], fillvalue=""):
                line = "   ".join(f"{text:<{room}}" for text in texts).rstrip()
                yield [" ", *((part, LIT if part == lit else "") for part in re.split(f"({lit})", line))]

    return Drawing(draw)


def _grid(matrix, lit, unlit, clean, room):
    """The lines of one matrix: its name, its cells, its caption; each at most `room` wide."""
    tall, wide = max(1, -(-matrix.rows // 16)), max(1, -(-matrix.columns // room))
    rows, columns = -(-matrix.rows // tall), -(-matrix.columns // wide)
    on = {(r // tall, c // wide) for r, c in matrix.lit}
    space = " " if 2 * columns - 1 <= room else ""
    cells = [space.join(lit if (r, c) in on else unlit for c in range(columns)) for r in range(rows)]
    scale = f"a cell is {tall} × {wide} tiles" if tall * wide > 1 else ""
    texts = [f"{matrix.name}  {matrix.rows} × {matrix.columns}", matrix.caption, scale]
    title, *notes = (textwrap.wrap(clean(text), room) for text in texts)
    return [*title, *cells, *(line for note in notes for line in note)]


_progress = threading.Lock()


@contextlib.contextmanager
def progress(description, total=None, *, after=2.0):
    """Show how far long work is: `with progress("compiling", 3) as advance: ...; advance()`.

    A bar on standard error, only on a terminal and only once `after` seconds have passed; without `total` it says that
    work goes on. Inside another progress nothing is shown.
    """
    screen = console(sys.stderr)
    if not screen.is_interactive or not _progress.acquire(blocking=False):
        yield lambda steps=1: None
        return
    look = BarColumn(complete_style=ACCENT, finished_style=ACCENT, pulse_style=ACCENT)
    columns = [TextColumn("{task.description}", markup=False), look, TaskProgressColumn(), TimeRemainingColumn()]
    bar = Progress(*columns, console=screen, transient=True, redirect_stdout=False, redirect_stderr=False)
    task = bar.add_task(to_ascii(description) if screen.options.ascii_only else description, total=total)
    timer = threading.Timer(after, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda steps=1: bar.advance(task, steps)
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()
        _progress.release()
