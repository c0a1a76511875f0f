import io
import re
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.color import Color
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from numba_flash import report
from numba_flash.hbm.ledger import Bill, Count, ledger, record
from numba_flash.hbm.predict import algorithm0, predict


class Terminal(io.StringIO):
    """A stream that says it is a terminal with Unicode and 256 colours."""

    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def printed(*renderables, encoding="utf-8"):
    raw = io.BytesIO()
    screen = report.console(io.TextIOWrapper(raw, encoding=encoding, newline="\n", write_through=True))
    for renderable in renderables:
        screen.print(renderable)
    return raw.getvalue().decode(encoding)


def lesson_03(n=1024, d=64, T=16, **more):
    bill = predict("tiled", n=n, d=d, blocks=T)
    before = ("naive", predict("naive", n=n, d=d))
    return {"counted": bill, "predicted": bill, "previous": before, "algorithm0": algorithm0(n=n, d=d)} | more


SAMPLE = """\
 HBM bill in elements of 4 bytes, as the threads request them
                      predicted     counted  difference  / naive
 scores   Q  loads    4,194,304   4,194,304           0   0.0625
          K  loads    4,194,304   4,194,304           0   0.0625
          S  stores   1,048,576   1,048,576           0   1.0000
 softmax  S  loads    3,145,728   3,145,728           0   1.0000
          P  stores   1,048,576   1,048,576           0   1.0000
 output   P  loads    4,194,304   4,194,304           0   0.0625
          V  loads    4,194,304   4,194,304           0   0.0625
          O  stores      65,536      65,536           0   1.0000
 total               22,085,632  22,085,632           0   0.0807  88.3 MB
 Algorithm 0, ideal   4,456,448   this stage: 4.96 times ideal
 error against float64  3.1e-07    naive's own  3.3e-07    exact

 One access of one element of a kernel argument by one thread = one load or
 store. Shared memory and registers are free. Counted is what the threads
 request; caches make the traffic in the HBM chips differ.
"""


def test_the_bill_of_lesson_03():
    below = report.error_line(3.1e-7, naive=3.3e-7, bound=1e-6)
    assert printed(report.bill_table(**lesson_03(below=below))) == SAMPLE
    assert printed(report.bill_table(**lesson_03(below=below)), encoding="ascii") == SAMPLE


def test_a_difference_is_marked_by_a_word():
    kwargs = lesson_03()
    kwargs["counted"] = kwargs["counted"] + Bill({"output": {"O": Count(loads=5)}, "softmax": {"S": Count(loads=1)}})
    lines = printed(report.bill_table(**kwargs)).splitlines()
    marked = [line.split() for line in lines if line.endswith("differs")]
    assert [words[:2] for words in marked] == [["softmax", "S"], ["O", "loads"], ["total", "22,085,632"]]
    assert [words[-3] for words in marked[:2]] == ["+1", "+5"]
    assert marked[1][-2] == "new"
    assert marked[2][3] == "+6"


def test_bills_of_different_element_size_differ():
    single, double = (predict("naive", n=8, d=4, dtype=dtype) for dtype in ("float32", "float64"))
    text = printed(report.bill_table(double, predicted=single))
    assert text.count("bytes differ") == 8
    assert "in elements of 8 bytes, as" in text
    mixed = Bill({"scores": {"Q": Count(8, itemsize=4), "mask": Count(8, itemsize=1)}})
    assert "in elements of 1 and 4 bytes, as" in printed(report.bill_table(mixed))


def test_one_bill_alone_and_none():
    bill = predict("naive", n=8, d=4)
    for name in ("counted", "predicted"):
        text = printed(report.bill_table(**{name: bill}))
        assert text.splitlines()[1].split() == [name]
        words = " ".join(text.split())
        other = {"counted": "Predicted", "predicted": "Counted"}[name]
        assert f"{name.capitalize()} is what the threads request" in words and other not in words
        assert "atomic" not in text
        assert "free" not in printed(report.bill_table(**{name: bill}, convention=False))
    assert "0 B" in printed(report.bill_table(Bill(), algorithm0=algorithm0(n=0, d=4)))
    with pytest.raises(ValueError, match="counted=None and predicted=None"):
        report.bill_table()


def test_atomics_have_a_row_and_count_twice():
    with ledger() as bill:
        record("histogram", (1, 1, 1), (32, 1, 1), {"bins": (4, 0, 0, 32), "x": (4, 32, 0, 0)})
    assert "An atomic has a row of its own" in " ".join(printed(bill).split())
    rows = [line.split() for line in printed(bill).splitlines()]
    assert ["histogram", "bins", "atomics", "32"] in rows
    assert ["total", "96", "384", "B"] in rows


def test_a_stage_with_other_kernels_is_compared_by_tensor_and_says_what_is_gone():
    before = ("tiled", predict("tiled", n=64, d=16))
    flash2 = Bill({"flash2": {"Q": Count(loads=1024), "K": Count(loads=2048), "L": Count(stores=64)}})
    lines = printed(report.bill_table(flash2, previous=before)).splitlines()
    assert [line.split()[-1] for line in lines[2:5]] == ["0.2500", "0.5000", "new"]
    assert " gone since tiled: S stores, S loads, P stores, P loads, V loads, O stores" in lines


@pytest.mark.parametrize(
    ("value", "to", "text"),
    [
        (1, 16, "0.0625"),
        (1, 32, "0.0313"),  # as by hand: a half goes up
        (3, 1024, "0.0029"),
        (1, 4096, "2.4e-04"),
        (0, 5, "0.0000"),
        (5, 5, "1.0000"),
        (123_456, 1000, "123"),
        (7, 0, "new"),
        (0, 0, "-"),
    ],
)
def test_quotients(value, to, text):
    before = Bill({"scores": {"Q": Count(loads=to), "K": Count(loads=1)}})
    now = Bill({"scores": {"Q": Count(loads=value), "K": Count(loads=1)}})
    table = report.bill_table(now, previous=("naive", before))
    lines = [line.split() for line in printed(table).splitlines()]
    assert report._ratio(value, to) == text
    assert not value or lines[2][-1] == text


@given(
    st.integers(0, 10**12),
    st.integers(-3, 3),
    st.sampled_from(["naive", "online_softmax", "a_very_long_name_of_a_stage"]),
)
def test_bills_of_13_digits_fit_80_columns(more, off, name):
    large = 9_999_999_999_999 - more
    counted = Bill({"logsumexp": {"S": Count(loads=large), "L": Count(atomics=(large + off) // 3)}})
    predicted = Bill({"logsumexp": {"S": Count(loads=large), "L": Count(atomics=large // 3)}})
    table = report.bill_table(counted, predicted=predicted, previous=(name, counted.scaled(3)), algorithm0=counted)
    for line in printed(table).splitlines():
        assert len(line) <= 80
        assert line == line.rstrip()
        assert f"{large:,}" in line or "S  loads" not in line


def test_a_bill_that_is_far_off_still_fits():
    kwargs = lesson_03(n=500_000, d=128)
    kwargs["counted"] = kwargs["counted"] + Bill({"output": {"V": Count(9_876_543_210_123)}})
    lines = printed(report.bill_table(**kwargs)).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert any("+9.9e+12" in line and line.endswith("differs") for line in lines)


@pytest.mark.parametrize(
    ("text", "ascii_text"),
    [
        ("Lesson 03 · tiled – naïve — N × N", "Lesson 03 - tiled - naive - N x N"),
        ("S = QKᵀ·scale, 4·N²⌈d/T⌉ + √d − √(2d)", "S = QK^T*scale, 4*N^2*ceil(d/T) + sqrt(d) - sqrt(2d)"),
        ("10⁻⁸ ≤ x ≥ m₁, m̃ ≠ −∞ ± ½", "10^-8 <= x >= m_1, m~ != -inf +/- 1/2"),
        ("Θ(N²d²/M) → σ ≈ 2 …", "Theta(N^2*d^2/M) -> sigma ~ 2 ..."),
        ("N²d, N²(2d + 1), QKᵀ, 5N² elements, O(N²)", "N^2*d, N^2*(2d + 1), QK^T, 5N^2 elements, O(N^2)"),
        ("“P” ∘ ‘dP’ • ■░█│ 漢", "\"P\" * 'dP' * #.#| ?"),
        ("plain", "plain"),
    ],
)
def test_to_ascii(text, ascii_text):
    assert report.to_ascii(text) == ascii_text


@given(st.text(max_size=40))
def test_to_ascii_takes_anything(text):
    assert report.to_ascii(text).isascii()


EVERYTHING = [
    report.heading("Lesson 03 · tiled", "N = 1024 – T = 16"),
    report.prose("Each of the ⌈N/T⌉ tiles, √d and `Q·Kᵀ`.\n\n    S = scale · Q Kᵀ"),
    report.bill_table(**lesson_03()),
    report.bars({"naïve": 3, "×": 1.5}, "µs"),
    report.tile_map(report.Tiles("Kᵀ", 2, 3, [(0, 1)], "a column – of tiles")),
    report.table(["stage", "≥"], [["naïve", 3]]),
    "a ± b ≥ c",
    Text("Kᵀ 漢 \udc80"),
]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "cp437"])
def test_ascii_alone_where_the_encoding_is_not_utf8(encoding):
    box = Table("Kᵀ", "⌈x⌉")
    box.add_row("N × N", "√d")
    text = printed(*EVERYTHING, box, encoding=encoding)
    assert text.isascii()
    assert "Lesson 03 - tiled" in text and "ceil(N/T)" in text and "a +/- b >= c" in text and "N x N" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert printed(Markdown("# Kᵀ\n- a\n- `b` ✓"), encoding=encoding).isascii()


def test_piped_output_is_plain_and_80_wide(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    text = printed(*EVERYTHING[:-1], "x" * 100)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) == 80
    assert not any(line.endswith(" ") for line in text.splitlines())
    assert "Kᵀ" in text


def test_standard_output_is_the_default(capsys):
    report.console().print("S[h, i, j] is no [bold]markup[/bold] :smile:")
    assert capsys.readouterr().out == "S[h, i, j] is no [bold]markup[/bold] :smile:\n"


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("80", 80), ("100", 100), ("180", 100)])
def test_a_terminal_is_used_up_to_100_columns(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    screen = report.console(Terminal())
    screen.print("x" * 300)
    assert screen.width == width
    assert len(screen.file.getvalue().splitlines()[0]) == width


def test_colour_on_a_terminal_unless_no_color(monkeypatch):
    def shown():
        screen = report.console(Terminal())
        screen.print(report.bars({"a": 1}))
        return screen.file.getvalue()

    assert "38;5;31m" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "38;5" not in shown()


def test_colours_are_readable_on_dark_and_on_light():
    def luminance(rgb):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for style in (report.ACCENT, report.LIT, report.WRONG):
        ink = luminance(Color.parse(style.split()[-1]).get_truecolor())
        for background in ((0, 0, 0), (41, 41, 41), (255, 255, 255), (253, 246, 227)):
            light, dark = sorted((ink, luminance(background)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 3


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (88_342_528, "88.3 MB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (9_995_000, "10.0 MB"),
        (1_094_975_488, "1.09 GB"),
        (40.3e9, "40.3 GB"),
        (5e12, "5.00 TB"),
        (123_456e15, "123,456 PB"),
    ],
)
def test_in_bytes(number, text):
    assert report.in_bytes(number) == text


def test_bars_are_in_proportion():
    lines = printed(report.bars({"all": 1_000_000, "half": 500_000, "little": 1, "none": 0}, "bytes")).splitlines()
    assert [line.split()[0] for line in lines] == ["all", "half", "little", "none"]
    full, half = lines[0].count("█"), lines[1].count("█")
    assert len(lines[0]) in (79, 80) and abs(full / 2 - half) <= 1
    assert lines[2] == " little  ▏ 1 B"
    assert lines[3] == " none    0 B"
    assert printed(report.bars({"all": 4, "little": 0.001}), encoding="ascii").splitlines()[1] == " little  # 0.001"
    assert printed(report.bars({"none": 0})) == " none  0\n"
    assert printed(report.bars({"rate": 12345.6}, "GB/s")).endswith(" 12,345.6 GB/s\n")


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_bars_of_nonsense(value):
    with pytest.raises(ValueError, match="tiled"):
        report.bars({"naive": 1, "tiled": value})


def test_tile_map_side_by_side():
    picture = report.tile_map(
        report.Tiles("Q", 3, 2, [(1, 0), (1, 1)], "row i = 1"),
        report.Tiles("S", 3, 4, {(1, 2)}, "one tile"),
    )
    assert [" ".join(line.split()) for line in printed(picture, encoding="ascii").splitlines()] == [
        "Q 3 x 2 S 3 x 4",
        ". . . . . .",
        "# # . . # .",
        ". . . . . .",
        "row i = 1 one tile",
    ]
    assert " ■ ■" in printed(picture)


def test_tile_map_of_many_tiles_is_coarser():
    matrices = [report.Tiles(name, 640, 640, [(639, 0)]) for name in "QKVS"]
    lines = printed(report.tile_map(*matrices)).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert sum("■" in line for line in lines) == 2
    assert sum(line.count("a cell is 40 × 27 tiles") for line in lines) == 4


def test_tile_map_of_tiles_that_are_not_there():
    with pytest.raises(ValueError, match=r"lit=\(2, 0\) is outside the 2 x 2 tiles of Q"):
        report.Tiles("Q", 2, 2, [(2, 0)])


def test_tile_map_without_tiles():
    assert printed(report.tile_map(report.Tiles("K", 0, 4, []))) == " K  0 × 4\n"
    assert printed(report.tile_map()) == ""


def test_error_line():
    assert printed(report.error_line(3e-7)) == " error against float64  3.0e-07\n"
    assert printed(report.error_line(1e-6, naive=1e-6, bound=1e-6)).endswith("    exact\n")
    within = " error against float64  6.1e-06    worst case of rounding  2.4e-03\n"
    assert printed(report.error_line(6.1e-6, bound=2.4e-3)) == within
    for error in (3e-3, float("nan")):
        beyond = printed(report.error_line(error, bound=2.4e-3))
        assert beyond.endswith("    worst case of rounding  2.4e-03    WRONG\n")
    wrong = printed(report.error_line(float("nan"), naive=3.3e-7, bound=1e-6))
    assert wrong == " error against float64  nan    naive's own  3.3e-07    WRONG (bound 1.0e-06)\n"


def test_heading_on_one_line_or_two():
    assert printed(report.heading("Lesson 03 · tiled", "N = 1024")) == f" Lesson 03 · tiled{' ' * 16}N = 1024\n"
    assert printed(report.heading("Lesson 03", "N = 1024, " * 7 + "T")).count("\n") == 2
    assert printed(report.heading("Lesson 03")) == " Lesson 03\n"


def test_prose():
    text = """
        One paragraph of
        two lines, with `S[h, i]`.

            S = Q @ K.T
              P = S

        Another.
        """
    assert printed(report.prose(text)).splitlines() == [
        " One paragraph of two lines, with `S[h, i]`.",
        "",
        "     S = Q @ K.T",
        "       P = S",
        "",
        " Another.",
        "",
    ]


def test_table():
    rows = [["naive", 273_743_872, 61.4256, "–"], ["tiled", 22_085_632, 4.9557, "the re-reads " * 5]]
    lines = printed(report.table(["stage", "elements", "x ideal", "deletes"], rows)).splitlines()
    assert lines[:2] == [" stage     elements  x ideal  deletes", " naive  273,743,872     61.4  –"]
    assert lines[3] == " " * 30 + "reads the re-reads"
    with pytest.raises(ValueError, match="2 cells"):
        report.table(["a", "b"], [[1]])


def test_progress_is_silent_without_a_terminal(capsys):
    with report.progress("compiling", 2, after=0) as advance:
        advance()
        time.sleep(0.05)
    assert capsys.readouterr() == ("", "")


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_progress_shows_on_a_terminal_and_goes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with report.progress("compiling [scores]", 4, after=0) as advance:
        advance(3)
        assert wait_for(lambda: "75%" in terminal.getvalue())
        print("a line")
        with report.progress("inside", after=0) as inner:
            inner()
    assert "compiling [scores]" in terminal.getvalue() and "inside" not in terminal.getvalue()
    assert terminal.getvalue().count("\x1b[?25h") == 1
    assert capsys.readouterr().out == "a line\n"


def test_progress_of_short_work_shows_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with pytest.raises(KeyboardInterrupt), report.progress("compiling"):
        raise KeyboardInterrupt
    assert terminal.getvalue() == ""
    with report.progress("again", after=0):
        assert wait_for(lambda: "again" in terminal.getvalue())


@pytest.mark.parametrize(
    "line, room, cut",
    [
        ("i = 1        # one", 18, "i = 1        # one"),
        ("i = 1        # one", 17, "i = 1  # one"),
        ("i = 1        # Alg. 1, l. 12", 19, "i = 1"),
        ("    total = first + second  # sum", 20, "    total = first..."),
        ("    # a comment alone", 14, "    # a com..."),
        ("    # a comment alone", 99, "    # a comment alone"),
    ],
)
def test_a_line_that_is_cut_has_its_comment_whole_or_none(line, room, cut):
    assert report.cut(line, room) == cut and len(cut) <= room


def test_an_indented_line_that_is_too_long_goes_on_under_its_own_beginning():
    lines = report.to_text(report.prose("So:\n\n    65  x = " + "word " * 20 + "\n\nAnd on.")).splitlines()
    assert [len(line) - len(line.lstrip()) for line in lines] == [1, 0, 5, 9, 0, 1]
    assert " ".join(" ".join(lines[2:4]).split()) == "65 x = " + "word " * 19 + "word" and max(map(len, lines)) <= 80
    as_wide = "    " + "x " * 37 + "x"
    assert report.to_text(report.prose(as_wide + "\n\nAnd on.")).splitlines()[0] == f" {as_wide}"


def test_the_columns_of_a_bill_are_two_apart_where_short_heads_make_room():
    bill = predict("flash", n=1024, d=64)
    lines = report.to_text(
        report.bill_table(bill, predicted=bill, previous=("online_softmax", predict("online_softmax", n=1024, d=64)))
    ).splitlines()
    assert re.fullmatch(r" +predicted {2,}counted  diff  / before", lines[1])
    rows = [line for line in lines[2:] if re.search(r" (loads|stores) ", line)]
    assert len(rows) == 12 and all(re.search(r"s  +[\d,]+  +[\d,]+  +0  +\S+$", row) for row in rows)
