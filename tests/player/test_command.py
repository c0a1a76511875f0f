"""`python -m numba_flash play`: what it prints to a terminal and to a pipe, its keys, what it says to a bad value."""

import contextlib
import io
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from numba_flash import __main__ as cli
from numba_flash.player import command, page, terminal
from numba_flash.player.play import play

SMALL = ["play", "--n", "21", "--d", "3", "--blocks", "4", "6"]


@pytest.fixture
def run(capsys):
    """The command in this process -> exit status, standard output, standard error."""

    def run(*args):
        try:
            status = cli.main([str(arg) for arg in args])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def small():
    return play("flash", n=21, d=3, blocks=(4, 6))


def test_piped_it_is_a_digest_of_bounded_length(run, small):
    status, out, err = run(*SMALL)
    assert status == 0 and err == "" and "\x1b" not in out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 90
    assert f"step {len(small.frames)} of {len(small.frames)}" in out
    whole = small.bill.total_bytes
    assert f"{whole:,} of {whole:,} B of the bill" in out
    rows = [line.split() for line in lines if re.match(r" +\d+  (initialise|flash) ", line)]
    assert 10 <= len(rows) <= 30
    for step, kernel, *_ in rows:
        assert small.launch(small.frames[int(step) - 1]).kernel == kernel
    m, l = (terminal.state_of(small, len(small.frames))[name] for name in "ml")
    assert f"{m:.6g}" in out and f"{l:.6g}" in out


@pytest.mark.parametrize("stage", ["flash", "flash2"])
def test_a_digest_has_whole_turns_of_the_loops(stage):
    """Steps (j, i), of the first of each kernel's loops and of the last, from Q_i to O; nothing of them is missing."""
    one = play(stage, n=21, d=3, blocks=(4, 6))
    turns = [(frame.launch, frame.block, frame.turns) for frame in one.frames]
    listed = terminal.listed(one)
    shown = [at for at in listed if at is not None]
    assert shown == sorted(set(shown)) and shown[0] == 0 and shown[-1] == len(turns) - 1
    for a, b in pairwise(listed):
        assert None in (a, b) or b == a + 1
    for a, b in ((at, at + way) for at in shown for way in (-1, 1) if 0 <= at + way < len(turns)):
        assert b in shown or turns[a] != turns[b]
    innermost = "i" if stage == "flash" else "j"
    steps = {str(turns[at]) for at in shown if innermost in turns[at][2]}
    assert len(steps) >= 2 and None in listed


def test_a_small_run_has_a_row_to_follow(run):
    status, out, err = run("play", "--n", 3, "--d", 2, "--stage", "flash2")
    assert (status, err) == (0, "") and " row 2: m = " in out


def test_a_terminal_that_cannot_be_drawn_over_gets_the_list(run, monkeypatch):
    monkeypatch.setattr(command.lesson, "is_terminal", lambda stream: True)
    monkeypatch.setattr(terminal, "watch", None)
    monkeypatch.setenv("TERM", "dumb")
    status, out, _ = run(*SMALL)
    assert status == 0 and "The last step:" in out


def test_a_picture_fits_the_terminal_and_lights_what_moves(small):
    step = next(n for n, frame in enumerate(small.frames) if frame.turns == {"j": (6, 6), "i": (8, 11)})

    def drawn(height):
        file = io.StringIO()
        terminal.report.console(file).print(terminal.picture(small, step, height))
        return file.getvalue().splitlines()

    full, low = drawn(60), drawn(30)
    assert len(low) <= 30 < len(full)
    text = "\n".join(full)
    assert "j = 6   i = 8 to 11" in text and "reads Q [8:12, 0:3], O [8:12, 0:3], l [8:12], m [8:12]" in text
    assert "l. 7   for each tile i of queries" in text and "l. 8   load Q_i, O_i, l_i, m_i" in text
    lit = [line for line in full if line.startswith(" > ")]
    first = small.launch(small.frames[step]).source[1]
    assert (
        len(lit) == len(small.frames[step].lines) and "Q_i[t] = Q[h, i, t]" in "".join(lit) and f"{first}" not in lit[0]
    )
    Q = [line[:3] for line in full[full.index(next(x for x in full if x.startswith(" Q  6"))) + 1 :][:6]]
    assert [cell.strip() for cell in Q] == ["·", "·", "■", "·", "·", "·"]


def screens(one, height, width=80):
    """The first frame of each place in a kernel as it is drawn at that size, as lines, with the frame."""
    for at in {(frame.launch, frame.lines): at for at, frame in reversed([*enumerate(one.frames)])}.values():
        frame = one.frames[at]
        file = io.StringIO()
        screen = terminal.report.console(file)
        screen.width = width
        screen.print(terminal.picture(one, at, height, width))
        yield frame, file.getvalue().splitlines()


@pytest.fixture(scope="module", params=["naive", "tiled", "online_softmax", "flash", "flash2"])
def any_stage(request):
    return play(request.param)


@pytest.mark.parametrize("height", [60, 22, 14])
def test_what_runs_now_is_on_the_screen_at_any_height(any_stage, height):
    """22 lines are what 80 × 24 leaves beside the keys: there the tiles, m and l, and the lines of both sources fit."""
    for frame, lines in screens(any_stage, height):
        assert len(lines) <= height and max(map(len, lines)) <= 80
        text = " ".join(" ".join(lines).split())
        assert any(line.startswith(" step ") for line in lines)
        marked = [line for line in lines if line.startswith(" > ")]
        more = re.search(r"^ +and (\d+) lines? more$", lines[-1])
        assert marked and len(marked) + (int(more[1]) if more else 0) == len(frame.lines)
        assert not more or (len(marked) >= 3 and height < 60)
        for n in any_stage.algorithm(frame):
            assert terminal.ALGORITHMS[any_stage.stage].lines[n].text.strip() in text
        if height > 14:
            assert "row 5: " in text and ("■" in text) == any(one.lit for one in terminal.maps(any_stage, frame))
            assert height == 22 or "HBM " in text


def test_a_source_line_has_its_comment_whole_or_none(any_stage):
    """A number of a line that is cut is another number."""
    source = [line.strip() for launch in any_stage.record.launches for line in launch.source[0]]
    comments = {line.partition("#")[2] for line in source}
    for _, lines in screens(any_stage, 60):
        for line in lines:
            if line[3:7].strip().isdecimal() and "#" in line[8:]:
                assert line.partition("#")[2].rstrip() in comments


def test_what_goes_on_in_the_next_line_is_indented(any_stage):
    for _, lines in screens(any_stage, 60):
        assert all(line == "" or line[0] == " " for line in lines)


def test_the_keys_are_named(run):
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    said = " ".join(run("play", "--help")[1].split())
    for text in (readme, said, terminal.HELP):
        assert all(key in text for key in ("space", "arrow", "home", "end", " q"))


def test_the_signs_of_a_digest_are_explained(run):
    out = " ".join(run(*SMALL)[1].split())
    assert "bytes so far" in out and "no line of the algorithm" in out and "not touched" in out
    assert not re.search("^ -  ", out)


@pytest.mark.parametrize(
    "pressed, shown",
    [
        (["right", "right", "left", "q"], [0, 1, 2, 1]),
        (["end", "right", "space", "q"], [0, "last", "last", 0]),
        (["left", "home", "x", "\x03"], [0, 0, 0, 0]),
        (["space", None, None, "space", "q"], [0, 0, 1, 2, 2]),
        (["q"], [0]),
    ],
)
def test_keys(pressed, shown, small, monkeypatch):
    waits, steps = [], []
    monkeypatch.setattr(terminal, "picture", lambda play, at, *size: steps.append(at) or "")
    monkeypatch.setattr(terminal, "Live", lambda **how: contextlib.nullcontext(enter_result=FakeLive()))
    keys = iter(pressed)
    monkeypatch.setattr(terminal, "keys", lambda: contextlib.nullcontext(lambda wait: waits.append(wait) or next(keys)))
    terminal.watch(small, speed=5)
    last = len(small.frames) - 1
    assert steps == [last if at == "last" else at for at in shown]
    assert waits[0] is None  # it does not play before it is told to
    assert pressed[0] != "space" or waits[1:3] == [1 / 5] * 2
    assert all(wait is None for wait, key in zip(waits[1:], pressed, strict=False) if key in ("left", "right", "end"))


class FakeLive:
    def update(self, *what, refresh):
        pass


@pytest.mark.parametrize(
    "args, said",
    [
        (["--n", 5000], "n=5000 leaves too many accesses to record: with d=16, n=134 is the most"),
        (["--n", 0], "'0' is not valid"),
        (["--row", 64], "row=64 is outside: with n=64 there are queries 0 to 63"),
        (["--stage", "flash3"], "invalid choice: 'flash3'"),
        (["--stage", "naive", "--blocks", 4], "stage 'naive' has no tiles"),
        (["--blocks", 4, 4, 4], "pass (Br, Bc)"),
        (["--beside", "flash2"], "--beside flash2 is for a page: add --html FILE"),
        (["--html", "FOLDER/x.html", "--beside", "flash"], "--beside flash is the stage itself"),
        (["--html", "FOLDER/none/x.html"], "does not exist"),
        (["--html", "FOLDER"], "end it in .html"),
    ],
)
def test_bad_values_get_one_sentence(run, args, said, tmp_path):
    status, out, err = run("play", *(str(arg).replace("FOLDER", str(tmp_path)) for arg in args))
    assert status == 2 and out == "" and said in err and "Traceback" not in err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "args, stages, blocks",
    [
        ([], ["flash", "flash2"], [(8, 6)] * 2),
        (["--beside", "none"], ["flash"], [(8, 6)]),
        (["--stage", "flash2"], ["flash2"], [(8, 6)]),
        (["--beside", "naive"], ["flash", "naive"], [(8, 6), None]),
        (["--beside", "tiled"], ["flash", "tiled"], [(8, 6), None]),
    ],
)
def test_what_a_page_shows(args, stages, blocks, run, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(command, "play", lambda stage, *, blocks, **sizes: asked.append((stage, blocks)))
    monkeypatch.setattr(page, "write", lambda plays, path, speed: 2000)
    status, out, _ = run("play", "--blocks", 8, 6, "--html", tmp_path / "x.html", *args)
    assert status == 0 and "x.html (2.00 kB)" in out
    assert asked == list(zip(stages, blocks, strict=True))


@pytest.mark.course
@pytest.mark.skipif(sys.platform == "win32", reason="a pseudo-terminal is something of Unix")
def test_in_a_terminal_it_plays_and_leaves_it_as_it_was():
    import os
    import pty
    import termios
    import time

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    args = [sys.executable, "-m", "numba_flash", *SMALL, "--speed", "30"]
    process = subprocess.Popen(args, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    output, end = b"", time.monotonic() + 60
    os.set_blocking(ours, False)
    keys = [b" ", b"\x1b[F", b"\x1b[D", b"q"]  # play, end, left, leave
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(BlockingIOError, OSError):
            output += os.read(ours, 2**16)
        if b"step 1 of" in output and keys:
            time.sleep(0.3)
            os.write(ours, keys.pop(0))
        time.sleep(0.05)
    with contextlib.suppress(BlockingIOError, OSError):
        output += os.read(ours, 2**20)
    process.kill()
    assert process.wait() == 0
    assert termios.tcgetattr(theirs) == before
    count = re.search(rb"step 1 of (\d+)", output)[1]
    assert b"step %s of %s" % (count, count) in output
    assert b"step %d of %s" % (int(count) - 1, count) in output
    assert b"\x1b[?1049l" in output  # the screen as it was


def test_with_standard_input_closed():
    command = [sys.executable, "-m", "numba_flash", "play", "--n", "8", "--d", "2"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" <&-', *command], capture_output=True, encoding="utf-8", timeout=60
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
