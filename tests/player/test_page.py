"""The page of the player, in a real browser: what it shows is what was recorded, and everybody can use it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from numba_flash.player import page as pages
from numba_flash.player.paper import ALGORITHMS
from numba_flash.player.play import place, play

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE, DESK = {"width": 360, "height": 740}, {"width": 1400, "height": 1000}
browsing = pytest.mark.course


def test_the_page_is_whole_and_small(tmp_path):
    one = play("flash", n=21, d=3, blocks=(4, 6))
    size = pages.write([one], tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text("utf-8")
    assert size == (tmp_path / "x.html").stat().st_size
    found = json.loads(re.search('<script type="application/json" id="data">(.*)</script>', text)[1])
    assert len(found["plays"][0]["frames"]) == len(one.frames)
    assert re.findall(r'\b(?:src|href)="([^"]*)"', text) == ["data:,"]
    assert set(re.findall(r"url\(.*?\)", text)) == {"url(#hatch)"} and "@import" not in text
    assert re.findall(r"https?://[^\"<]+", text) == [ALGORITHMS["flash"].link, "http://www.w3.org/2000/svg"]
    assert str(Path(pages.__file__).parent) not in text


# --- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plays():
    return [play("flash"), play("flash2")]


@pytest.fixture(scope="module")
def files(plays, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    pages.write(plays, folder / "flash.html")
    pages.write([play("online_softmax"), play("naive")], folder / "three.html")
    pages.write([play("flash2", n=30, d=64, causal=True, row=29)], folder / "wide.html")
    return folder


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no Chromium on the path")
    with sync_api.sync_playwright() as running:
        yield lambda **how: running.chromium.launch_persistent_context(executable_path=path, args=FLAGS, **how)


@pytest.fixture
def open_page(chromium, files, tmp_path):
    """open_page("flash.html", viewport=…, color_scheme=…) -> the page; at the end no error and no request was made."""
    contexts, said, asked = [], [], []

    def opened(name="flash.html", **how):
        folder = tmp_path / f"user{len(contexts)}"
        context = chromium(user_data_dir=str(folder), **{"viewport": DESK, "color_scheme": "light"} | how)
        contexts.append(context)
        one = context.pages[0]
        one.on("console", lambda message: said.append(message.text))
        one.on("pageerror", lambda error: said.append(str(error)))
        one.on("request", lambda request: asked.append(request.url))
        one.goto((files / name).as_uri())
        return one

    yield opened
    for context in contexts:
        context.close()
    assert not said
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in asked if url.startswith("file:")]) == len(contexts)


STATE = """() => [...document.querySelectorAll(".play")].map((play) => ({
  lines: [...play.querySelectorAll("pre:not([hidden]) code.lit")].map((line) => Number(line.dataset.line)),
  source: [...play.querySelectorAll("pre:not([hidden]) code.lit")].map((line) => line.lastChild.data.trim()),
  paper: [...play.querySelectorAll(".algorithm li.lit")].map((line) => line.dataset.number),
  read: Number(play.querySelector("[data-read]").dataset.read),
  written: Number(play.querySelector("[data-written]").dataset.written),
  lit: [...play.querySelectorAll("figure:not(.never) rect.read, figure:not(.never) rect.write")].map((rect) =>
    [rect.closest("figure").dataset.array, rect.getAttribute("class"), rect.dataset.box]),
  scores: [...play.querySelectorAll(".never rect.read, .never rect.write")].map((rect) => rect.dataset.box),
  visited: play.querySelectorAll(".never rect.visited").length,
  values: Object.fromEntries([...play.querySelectorAll("[data-name]")].map((one) =>
    [one.dataset.name, one.lastChild.dataset.value])),
  lists: Object.fromEntries([...play.querySelectorAll("[data-list]")].map((one) =>
    [one.dataset.list, one.dataset.values])),
  at: play.querySelector(".where").textContent,
}))"""


def to(one, step):
    one.locator("#step").evaluate(
        "(input, value) => { input.value = value; input.dispatchEvent(new Event('input')); }", step
    )


@browsing
def test_every_step_shows_what_was_recorded(open_page, plays):
    one = open_page()
    count = max(len(p.frames) for p in plays)
    known = [{}, {}]
    for step in range(1, count + 1):
        to(one, step)
        for p, shown, row in zip(plays, one.evaluate(STATE), known, strict=True):
            last = min(step, len(p.frames)) - 1
            frame = p.frames[last]
            launch = p.launch(frame)
            source, first = launch.source
            assert shown["lines"] == list(frame.lines)
            assert shown["source"] == [source[line - first].strip() for line in frame.lines]
            assert [int(number) for number in shown["paper"]] == list(frame.paper)
            assert (shown["read"], shown["written"]) == (frame.read_bytes, frame.write_bytes)
            names = {"read": "read", "written": "write"}
            boxes = [[launch.arrays[t.array].name, names[t.kind], ",".join(map(str, place(t, launch.arrays[t.array])))]
                     for t in frame.touches]  # fmt: skip
            assert sorted(shown["lit"]) == sorted(boxes)
            scores = p.scores(frame)
            assert set(shown["scores"]) == ({",".join(map(str, (*scores[0], *scores[1])))} if scores else set())
            assert shown["visited"] == len({p.scores(f) for f in p.frames[: last + 1]} - {None})
            assert shown["at"].startswith(f"Step {last + 1} of {len(p.frames)}{', finished' * (step > len(p.frames))}:")
            if step <= len(p.frames):
                for name, value in frame.row.items():
                    fresh = name.endswith("_ij") and 0 in value
                    row[name] = ({} if fresh else row.get(name, {})) | value if isinstance(value, dict) else value
                    if name == "S_ij" and fresh:
                        row.pop("P_ij", None)
            for name, value in shown["values"].items():
                assert value == "" if name not in row else np.float32(value) == np.float32(row[name])
            for name, values in shown["lists"].items():
                found = np.array(values.split(",") if values else [], np.float32)
                assert np.array_equal(
                    found, np.array([row.get(name, {})[k] for k in sorted(row.get(name, {}))], np.float32)
                )
    assert np.array_equal(found, plays[1].out[5])


@browsing
def test_the_gauge_and_the_meter_have_the_right_lengths(open_page, plays):
    one = open_page(reduced_motion="reduce")
    to(one, len(plays[0].frames))
    shares = one.evaluate("""() => [...document.querySelectorAll(".play")].map((play) =>
        [".part", ".loads", ".stores"].map((name) => [...play.querySelectorAll(".gauge " + name)].reduce((sum, part) =>
          sum + part.getBoundingClientRect().width / part.parentNode.clientWidth, 0)))""")
    scale = max(plays[0].bill.total_bytes, plays[0].ideal.total_bytes)
    for p, (shared, read, written) in zip(plays, shares, strict=True):
        assert shared == pytest.approx(3 * 1024 / 49152, abs=0.003)
        assert read == pytest.approx(p.bill.read_bytes / scale, abs=0.003)
        assert written == pytest.approx(p.bill.write_bytes / scale, abs=0.003)


def wait(one, condition):
    """Until it is true in the page, whose policy forbids Playwright's own way."""
    for _ in range(100):
        if one.evaluate(condition):
            return
        one.wait_for_timeout(50)
    raise AssertionError(f"never true: {condition}")


def step_of(one):
    return int(one.locator("#step").input_value())


@browsing
def test_keys(open_page):
    one = open_page()
    press = one.keyboard.press
    for key, step in (
        ("ArrowRight", 2),
        ("ArrowRight", 3),
        ("ArrowLeft", 2),
        ("End", 118),
        ("ArrowRight", 118),
        ("Home", 1),
    ):
        press(key)
        assert step_of(one) == step
    assert "Step 1." in one.locator("#status").text_content()
    for _ in range(3):
        press("+")
    assert one.locator("#speed").input_value() == "30"
    press("-")
    assert one.locator("#speed").input_value() == "16"
    press(" ")
    assert one.locator("#play").text_content() == "Stop"
    wait(one, "Number(document.getElementById('step').value) >= 4")
    assert one.locator("#status").text_content() == ""  # quiet while it plays
    press(" ")
    stopped = step_of(one)
    one.wait_for_timeout(300)
    assert step_of(one) == stopped and one.locator("#play").text_content() == "Play"
    before = one.evaluate("document.documentElement.dataset.theme")
    press("t")
    assert {before, one.evaluate("document.documentElement.dataset.theme")} == {"light", "dark"}
    press("Home")
    one.locator("#next").focus()
    press(" ")  # a button keeps its own key
    assert step_of(one) == 2 and one.locator("#play").text_content() == "Play"
    one.locator("#speed").focus()
    press("ArrowUp")  # so does a list
    assert one.locator("#speed").input_value() == "8" and step_of(one) == 2
    one.locator("#step").focus()
    press("ArrowRight")
    assert step_of(one) == 3


@browsing
def test_it_ends_by_itself_and_starts_again(open_page):
    one = open_page()
    one.locator("#speed").select_option("60")
    to(one, 110)
    one.locator("#play").click()
    wait(one, "document.getElementById('play').textContent === 'Play'")
    assert step_of(one) == 118
    one.locator("#play").click()
    wait(one, "Number(document.getElementById('step').value) < 100")


CONTRAST = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const part = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const ratio = (...two) => {
    const [x, y] = two.map(light).sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
      if (colour[3] !== 0) throw new Error("half transparent");
    }
    return [255, 255, 255];
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.getClientRects().length || node.closest("script, style")) continue;
    const style = getComputedStyle(node);
    const contrast = ratio(channels(style.color), ground(node)), text = walker.currentNode.data.trim().slice(0, 30);
    found.push([contrast, text, parseFloat(style.fontSize)]);
  }
  const paper = channels(getComputedStyle(document.querySelector(".whole")).fill);
  const drawn = [["rect.read", "fill"], ["rect.write", "stroke"], ["path.marker", "fill"], [".whole", "stroke"],
    [".bar", "fill"], [".hatching", "stroke"]];
  const marks = drawn.map(([name, what]) =>
    [ratio(channels(getComputedStyle(document.querySelector(name))[what]), paper), name]);
  return { texts: found, marks };
}"""


@browsing
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name, step", [("flash.html", 50), ("three.html", 60), ("wide.html", 10**6)])
def test_contrast(open_page, scheme, name, step):
    one = open_page(name, color_scheme=scheme, reduced_motion="reduce")
    assert one.evaluate("document.documentElement.dataset.theme") == scheme
    one.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    to(one, step)
    measured = one.evaluate(CONTRAST)
    assert len(measured["texts"]) > 100
    assert [text for text in measured["texts"] if text[0] < 4.5] == []
    assert [text for text in measured["texts"] if text[2] < 12] == []  # pixels
    assert [mark for mark in measured["marks"] if mark[0] < 3] == []


@browsing
def test_focus_is_visible_everywhere_and_every_control_has_a_name(open_page):
    one = open_page()
    seen = []
    for _ in range(40):
        one.keyboard.press("Tab")
        seen.append(one.evaluate("""() => {
          const at = document.activeElement, style = getComputedStyle(at);
          return [at.tagName, at.id || at.getAttribute("aria-label") || at.textContent, style.outlineStyle,
                  parseFloat(style.outlineWidth), style.outlineColor];
        }"""))  # fmt: skip
        if seen[-1][0] == "BODY":
            break
    reached = {name for _, name, *_ in seen}
    assert {"theme", "first", "back", "play", "next", "last", "speed", "step", "Source of kernel flash2"} <= reached
    for tag, _, style, width, colour in seen:
        assert tag == "BODY" or (style == "solid" and width >= 2 and colour == "rgb(11, 87, 208)")
    names = one.evaluate("""() => [
      ...document.querySelectorAll("button, select, input, [role=img], [role=region], section")]
      .map((node) => [node.outerHTML.slice(0, 60), (node.getAttribute("aria-label") || node.textContent
        || "").trim(), !node.hasAttribute("aria-labelledby")
        || document.getElementById(node.getAttribute("aria-labelledby")) !== null])""")
    assert [node for node, name, labelled in names if not name or not labelled] == []
    places = "document.querySelectorAll('header, main, footer').length + ':' + document.documentElement.lang"
    assert one.evaluate(places) == "3:en"
    assert one.evaluate("new Set([...document.querySelectorAll('[id]')].map((node) => node.id)).size"
                        " === document.querySelectorAll('[id]').length")  # fmt: skip


MOVING = """() => [...document.querySelectorAll("*")].filter((node) => {
  const style = getComputedStyle(node);
  const times = [...style.transitionDuration.split(","), ...style.animationDuration.split(",")];
  return times.some((time) => parseFloat(time) > 0);
}).length"""


@browsing
def test_reduced_motion_is_respected_and_nothing_starts_by_itself(open_page):
    moving, still = (open_page(reduced_motion=how) for how in ("no-preference", "reduce"))
    assert moving.evaluate(MOVING) > 0
    assert still.evaluate(MOVING) == 0
    moving.wait_for_timeout(600)
    assert step_of(moving) == step_of(still) == 1


@browsing
@pytest.mark.parametrize("name", ["flash.html", "three.html", "wide.html"])
def test_a_phone_needs_no_scrolling_sideways(open_page, name):
    one = open_page(name, viewport=PHONE)
    one.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    last = int(one.locator("#step").get_attribute("max"))
    for step in (1, last // 3, last // 2, last):
        to(one, step)
        assert one.evaluate("document.documentElement.scrollWidth") <= 360
        wide = one.evaluate("[...document.querySelectorAll('.hbm')].map((node) => node.scrollWidth - node.clientWidth)")
        assert max(wide) <= 0
    controls = one.locator("#controls").bounding_box()
    assert controls["y"] + controls["height"] <= 741 and controls["height"] < 150
    sizes = one.evaluate(
        "[...document.querySelectorAll('button, select')].map((node) => node.getBoundingClientRect().height)"
    )
    assert min(sizes) >= 40
    one.set_viewport_size(DESK)
    assert one.evaluate("document.documentElement.scrollWidth") <= 1400 and step_of(one) == last


@browsing
def test_what_the_chip_holds_is_grey(open_page, plays):
    """In shared memory and in registers alike: what the block has written so far, in one box."""
    one = open_page()
    grey = """() => [...document.querySelectorAll(".play")].map((play) => Object.fromEntries(
      [...play.querySelectorAll(".figures figure")].map((figure) =>
        [figure.dataset.array, [...figure.querySelectorAll("rect.visited")].map((rect) => rect.dataset.box)])))"""
    held, blocks, seen = [{}, {}], [None, None], set()
    for step in range(max(len(p.frames) for p in plays)):
        to(one, step + 1)
        for at, (p, shown) in enumerate(zip(plays, one.evaluate(grey), strict=True)):
            if step >= len(p.frames):
                continue
            frame = p.frames[step]
            arrays = p.launch(frame).arrays
            if (frame.launch, frame.block) != blocks[at]:
                held[at], blocks[at] = {}, (frame.launch, frame.block)
            for touch in frame.touches:
                array = arrays[touch.array]
                if array.space != "global" and touch.kind != "read":
                    top, bottom, left, right = place(touch, array)
                    a, b, c, d = held[at].get(array.name, (top, bottom, left, right))
                    held[at][array.name] = min(a, top), max(b, bottom), min(c, left), max(d, right)
                    seen.add(array.space)
            wanted = {array.name: [] for array in arrays if array and array.space != "global"}
            wanted |= {name: [",".join(map(str, found))] for name, found in held[at].items()}
            assert shown == wanted, (p.stage, step)
    assert seen == {"shared", "local"}


@browsing
def test_a_label_on_the_chip_takes_two_lines_at_most(open_page):
    one = open_page()
    to(one, 32)
    rows = """[...document.querySelectorAll(".figures figcaption span")].map((span) => {
      const range = document.createRange();
      range.selectNodeContents(span);
      return [range.getClientRects().length, span.textContent];
    })"""
    found = one.evaluate(rows)
    assert any("shared" in text for _, text in found) and max(found)[0] <= 2, found


@browsing
def test_the_scheme_of_the_system_and_the_button(open_page):
    one = open_page(color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = one.evaluate(ground)
    one.locator("#theme").click()
    assert one.evaluate(ground) == "rgb(255, 255, 255)" != dark
    assert one.locator("#theme").text_content() == "Dark colours"
    assert "black mark" in one.locator("[data-stage=flash]").text_content()


@browsing
def test_size_and_first_paint(open_page, files):
    assert (files / "flash.html").stat().st_size < 10**6
    one = open_page()
    paint = "performance.getEntriesByName('first-contentful-paint')"
    wait(one, f"{paint}.length > 0")
    assert one.evaluate(f"{paint}[0].startTime") <= 1000


@browsing
def test_flash_is_compiled_recorded_and_written_in_ten_seconds(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource", reason="child processes are timed on Unix alone")
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    args = ["--stage", "flash", "--beside", "none", "--html", str(tmp_path / "x.html")]
    subprocess.run([sys.executable, "-m", "numba_flash", "play", *args], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 10
