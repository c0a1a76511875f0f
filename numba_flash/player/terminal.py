"""The player in a terminal: a frame as lines of text, played with keys, or as a digest where nobody can press one."""

import contextlib
import sys
import time
from collections import Counter
from itertools import groupby, product

from rich.console import Group
from rich.live import Live
from rich.text import Text

from .. import report
from ..engine.model import STATIC_SHARED
from ..lesson import plural
from .frames import counts
from .paper import ALGORITHMS
from .play import place

TURNS = 4  # of each launch that a digest begins with
GAUGE = 32  # columns of a gauge
NUMBERS = 6  # columns of O that a line has room for
HELP = " space: play or stop   arrows: a step   home, end: first, last   q: leave"
KEYS = "space plays and stops, the arrow keys go a step, home and end to the first and the last, q leaves"


GIVES_WAY = "surroundings", "wide", "heading", "space", "gauges", "tiles", "row", "algorithm"  # the first first
FEW = 4  # lines of source that are shown rather than the tiles


def picture(play, at, height=60, width=report.WIDTH):
    """What is printed of one frame: at most `height` lines. The lines that run now, of the algorithm and of the source,
    stay, and the rest gives way where there is no room, one part after another: the tiles to the first FEW lines alone.
    """
    frame, tiles = play.frames[at], GIVES_WAY.index("tiles")
    for enough, levels in ((len(frame.lines), range(tiles + 1)), (FEW, range(tiles, len(GIVES_WAY) + 1))):
        for left_out in levels:
            parts = list(above(play, at, width, GIVES_WAY[:left_out]))
            source = list(listing(play.launch(frame), frame, width, around=not left_out))
            room = height - sum(len(lines_of(part, width)) for part in parts)
            if room >= (min(enough, len(source)) if left_out else len(source)):
                rest = f"         and {plural(len(source) - room + 1, 'line')} more"
                return Group(*parts, *(source if room >= len(source) else [*source[: room - 1], Text(rest)]))
    return Group(*(parts + source)[:height])


def above(play, at, width, left_out):
    """The parts of a picture above its listing, without those left out; without "wide" more tiles are side by side."""
    frame = play.frames[at]
    launch, algorithm = play.launch(frame), ALGORITHMS[play.stage]
    where = "".join(f"   {name} = {low}" + f" to {high}" * (high > low) for name, (low, high) in frame.turns.items())
    step = f"step {at + 1} of {len(play.frames)}   {launch.kernel}, block {frame.block}"
    step += f", after {plural(frame.phase, 'barrier')}"
    space = [""] * ("space" not in left_out)
    if "heading" not in left_out:
        yield report.heading(f"Play: {play.stage}", play.facts)
    yield from hung(f" {step}{where}", width, 5)
    yield from hung(f" {play.says(frame)}", width, 5)
    if "tiles" not in left_out:
        shown = list(maps(play, frame))
        beside = 3 if "wide" not in left_out else max((width + 2) // 13, 1)
        yield from (*space, report.tile_map(*shown, beside=beside), *space)
    if "gauges" not in left_out:
        done, whole = frame.read_bytes + frame.write_bytes, play.bill.total_bytes
        yield gauge("SRAM", launch.shared_bytes, STATIC_SHARED, "of shared memory")
        yield gauge("HBM", done, whole, "of the bill")
    if "row" not in left_out:
        yield from (*of_row(play, at), *space)
    if "algorithm" not in left_out:
        yield Text(f" {algorithm.name}", style="bold")
        for n in play.algorithm(frame):
            number = algorithm.lines[n].number
            line = f" l. {number:<3} " if number else " " * 8
            yield from hung(line + algorithm.lines[n].text.strip(), width, 12)
    yield from space


def hung(text, width, indent):
    """A text as lines, those after the first indented."""
    return map(Text, report.wrapped(text, width, subsequent_indent=" " * indent))


def lines_of(part, width):
    screen = report.console(sys.stdout)
    return screen.render_lines(part, screen.options.update(width=width))


def maps(play, frame):
    """The matrices in HBM as tiles, those that the frame touches lit; of scores on chip, the tile that lives."""
    launch = play.launch(frame)
    lit, kinds = {}, {}
    for touch in frame.touches:
        array = launch.arrays[touch.array]
        if array.space == "global":
            tall, wide = play.tile(array.name)
            top, bottom, left, right = place(touch, array)
            down, along = range(top // tall, bottom // tall + 1), range(left // wide, right // wide + 1)
            lit.setdefault(array.name, set()).update(product(down, along))
            kinds.setdefault(array.name, []).append(touch.kind)
    shown = []
    for name, (rows, columns) in play.matrices().items():
        if name not in "lmL":  # they move with O
            tall, wide = play.tile(name)
            shape = -(-rows // tall), -(-columns // wide)
            shown.append(report.Tiles(name, *shape, lit.get(name, ()), " and ".join(kinds.get(name, ["not touched"]))))
    if "S" not in play.matrices():
        tall, wide = play.sides
        tiles, now = -(-play.n // tall), play.scores(frame)
        cells = {(now[0][0] // tall, now[1][0] // wide)} if now else set()
        shown.append(report.Tiles("S", tiles, -(-play.n // wide), cells, "on chip, never in HBM"))
    return shown


def gauge(name, value, whole, what):
    length = round(GAUGE * value / whole)
    return Text(f" {name:<5} {'█' * length}{'░' * (GAUGE - length)} {value:,} of {whole:,} B {what}")


def of_row(play, at):
    """m, l and O of the row as they are after frame number `at`."""
    state = state_of(play, at)
    numbers = [f"{name} = {state[name]:.6g}" for name in ("m", "l", "L") if name in state]
    O = [f"{state['O'][t]:.4g}" for t in sorted(state.get("O", {}))]
    shown = [f" row {play.row}: {'   '.join(numbers) or 'nothing yet'}"]
    if O:
        shown.append(f"   O = {'  '.join(O[:NUMBERS])}{'  ...' * (len(O) > NUMBERS)}")
    return list(map(Text, shown))


def state_of(play, at):
    """What is known of the row after frame number `at`: each value is the last that the kernel gave it."""
    state = {}
    for frame in play.frames[: at + 1]:
        for name, value in frame.row.items():
            state[name] = {**state.get(name, {}), **value} if isinstance(value, dict) else value
    return state


def listing(launch, frame, width, around):
    """The lines that ran, marked; or what is around and between them, too."""
    source, first = launch.source
    ran = sorted(line - first for line in frame.lines)
    for n in range(max(0, ran[0] - 1), min(len(source), ran[-1] + 2)) if around else ran:
        mark = " > " if n in ran else "   "
        start = f"{mark}{first + n:>4}  "
        yield Text(start + report.cut(source[n], width - len(start)), style="bold" if mark.strip() else "")


def digest(play):
    """Print the frames of some turns, a line each, then the last frame in full."""
    screen = report.console()
    count, rows = len(play.frames), []
    for at in listed(play):
        if at is None:
            rows.append(["   …", "", "", "", ""])
            continue
        frame = play.frames[at]
        paper = ", ".join(map(str, frame.paper)) or "-"
        so_far = frame.read_bytes + frame.write_bytes
        rows.append([f"{at + 1:>4}", play.launch(frame).kernel, paper, f"{so_far:>12,}", play.says(frame)])
    moving = sum(bool(counts(play.record, frame)) for frame in play.frames)
    screen.print(report.heading(f"Play: {play.stage}", play.facts))
    screen.print()
    screen.print(report.table(["step", "kernel", "line", "bytes so far", "what it does"], rows))
    screen.print()
    screen.print(
        report.prose(f"""
"line" is that of the paper's algorithm, and "-" where no line of the algorithm says what happens. "bytes so far" are
those of HBM, of this step and all before it.

Of {count} steps {moving} touch HBM. Listed are the first turns of each kernel's loops, and the last one. In a terminal,
keys step through all; --html FILE writes a page that shows them.

The last step:
""")
    )
    screen.print(picture(play, count - 1))


def listed(play):
    """Which frames a digest lists, None where some are left out: of each launch those of the first turns, each whole,
    and those of the last turn of all.
    """
    turns = groupby(enumerate(play.frames), lambda one: (one[1].launch, one[1].block, one[1].turns))
    turns = [[at for at, _ in group] for _, group in turns]
    shown, seen = [], Counter()
    for frames in turns:
        seen[launch := play.frames[frames[0]].launch] += 1
        if seen[launch] <= TURNS or frames is turns[-1]:
            shown += [None] * bool(shown and frames[0] > shown[-1] + 1) + frames
    return shown


def watch(play, speed):
    """Show its first step; then what the keys say, until q."""
    at, playing, last = 0, False, len(play.frames) - 1
    screen = report.console()
    with keys() as read, Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            height = max(screen.height - 1, 10)
            live.update(Group(picture(play, at, height - 1, screen.width), Text(HELP)), refresh=True)
            key = read(1 / speed if playing else None)
            if key in ("q", "\x03", "\x1b"):
                return
            if key == "space":
                at, playing = (0 if at == last and not playing else at), not playing
            elif key:
                playing = False
            at = {"left": at - 1, "right": at + 1, "home": 0, "end": last, None: at + playing}.get(key, at)
            at = min(max(at, 0), last)
            playing = playing and at < last


ESCAPES = {"[D": "left", "[C": "right", "[H": "home", "[F": "end", "[1~": "home", "[4~": "end"}
WINDOWS = {"K": "left", "M": "right", "G": "home", "O": "end"}


@contextlib.contextmanager
def keys():
    """`read(seconds)` -> the name of a key that is pressed within that time, or None; without a time it waits."""
    if sys.platform == "win32":
        import msvcrt

        def read(seconds):
            end = None if seconds is None else time.monotonic() + seconds
            while not msvcrt.kbhit():
                if end is not None and time.monotonic() >= end:
                    return None
                time.sleep(0.01)
            key = msvcrt.getwch()
            return WINDOWS.get(msvcrt.getwch()) if key in "\x00\xe0" else "space" if key == " " else key

        yield read
        return
    import os
    import select
    import termios
    import tty

    stream = sys.stdin.fileno()
    before = termios.tcgetattr(stream)

    def pressed(seconds):
        return bool(select.select([stream], [], [], seconds)[0])

    def read(seconds):
        if not pressed(seconds):
            return None
        key = os.read(stream, 1).decode(errors="ignore")
        if key == "\x1b" and pressed(0.05):
            return ESCAPES.get(os.read(stream, 4).decode(errors="ignore").replace("O", "["), "other")
        return "space" if key == " " else key or "q"

    try:
        tty.setcbreak(stream)
        yield read
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)
