"""Pictures of a lesson's output: SVG for each part, or one HTML page."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from numba_flash import picture, report

HEADING = report.heading("Lesson 99 · <tests>", "N = 4")
PAGES = {
    "1": [["1. One", ""], [report.bars({"naive": 2, "tiled": 1}), ""]],
    "1-answer": [["the answer", ""], ["a < b & c", report.tile_map(report.Tiles("S", 2, 2, [(0, 1)])), ""]],
}


def saved(tmp_path, name):
    files = picture.save(HEADING, PAGES, tmp_path / name, "Lesson <99>")
    return files, [Path(file).read_text(encoding="utf-8") for file in files]


def luminance(ink):
    channels = (int(ink[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("suffix", ["svg", "SVG"])
def test_an_svg_for_each_page(tmp_path, suffix):
    files, texts = saved(tmp_path, f"x.{suffix}")
    assert files == [str(tmp_path / f"x-{name}.{suffix}") for name in ("1", "1-answer")]
    for text, page in zip(texts, ("1. One", "a < b & c"), strict=True):
        root = ET.fromstring(text)
        lines = [element.text.replace("\xa0", " ").strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert "Lesson 99 · <tests>" in lines and page in lines
        assert root.find("{http://www.w3.org/2000/svg}title").text == "Lesson <99>"
        _, _, width, height = map(float, root.get("viewBox").split())
        shown = root.findall(".//{http://www.w3.org/2000/svg}text")
        assert max(float(line.get("x")) + float(line.get("textLength")) for line in shown) <= width
        assert height - 80 < max(float(line.get("y")) for line in shown) < height - 20


def test_one_html_page(tmp_path):
    files, (text,) = saved(tmp_path, "x.html")
    assert files == [str(tmp_path / "x.html")]
    body = re.sub("<[^>]*>", "", text.partition("<pre")[2])
    assert body.count("Lesson 99 · &lt;tests&gt;") == 1 and "a &lt; b &amp; c" in body and "1. One" in body
    assert 'name="viewport"' in text and "<title>Lesson &lt;99&gt;</title>" in text and "overflow-x: auto" in text


@pytest.mark.parametrize("name", ["x.svg", "x.html"])
def test_nothing_is_loaded_and_nothing_changes(tmp_path, name, monkeypatch):
    _, first = saved(tmp_path, name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    assert saved(tmp_path, name)[1] == first
    for text in first:
        rest = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|url\(|@import|@font-face|<script|src=|href=", rest)
        assert "█" in text or "■" in text


@pytest.mark.parametrize("name", ["x.svg", "x.html"])
def test_contrast_in_light_and_dark(tmp_path, name):
    listing = list(report.source_lines(["x = 1  # why"], 7, 80))
    more = {**PAGES, "2": [[report.error_line(2.0, naive=0.5, bound=1.0), report.prose("`code`"), *listing]]}
    files = picture.save(HEADING, more, tmp_path / name, "Lesson 99")
    for file in files:
        style = re.search("<style>(.*)</style>", Path(file).read_text(encoding="utf-8"), re.DOTALL)[1]
        light, dark = style.split("@media (prefers-color-scheme: dark)")
        for rules, paper in ((light, "#ffffff"), (dark, "#181818")):
            inks = set(re.findall("#[0-9a-f]{6}", rules)) - {paper}
            assert paper in rules and len(inks) >= 2
            for ink in inks:
                low, high = sorted((luminance(ink), luminance(paper)))
                assert (high + 0.05) / (low + 0.05) >= 4.5, ink


def test_what_is_no_picture(tmp_path):
    with pytest.raises(ValueError, match=r"lesson\.png.*\.svg or \.html"):
        picture.save(HEADING, PAGES, tmp_path / "lesson.png", "")


def test_a_long_page_goes_on_and_no_block_is_torn_apart(tmp_path):
    blocks = [[f"{name}{line}" for line in range(lines)] for name, lines in (("p", 20), ("q", 10), ("r", 60), ("s", 5))]
    alone = picture.save(HEADING, {"8": [["8. Title", ""], blocks[2]]}, tmp_path / "y.svg", "")
    assert [Path(file).name for file in alone] == ["y-8.svg"]
    files = picture.save(HEADING, {"7": blocks}, tmp_path / "x.svg", "")
    texts = [Path(file).read_text(encoding="utf-8") for file in files]
    assert [Path(file).name for file in files] == ["x-7.svg", "x-7-b.svg", "x-7-c.svg"]
    assert [set(re.findall(r">([pqrs])\d+<", text)) for text in texts] == [{"p", "q"}, {"r"}, {"s"}]
    assert all("Lesson&#160;99" in text for text in texts)
