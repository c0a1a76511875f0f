"""What a lesson printed as pictures for slides: SVG, or one HTML page.

They load nothing from elsewhere, follow the light or dark setting of what shows them, and are the same in every run.
"""

import re
from html import escape
from io import StringIO
from pathlib import Path
from string import ascii_lowercase

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from . import report
from .files import write_text

LINES, TITLE = 36, 2  # of an SVG, its heading apart; of the title of a part, which never stands alone
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
LIGHT = TerminalTheme((255, 255, 255), (24, 24, 24), [(0, 0, 0)] * 8)
DARK = TerminalTheme((24, 24, 24), (232, 232, 232), [(255, 255, 255)] * 8)
INKS = {  # what report.ACCENT, LIT and WRONG are on a terminal -> on LIGHT, on DARK: contrast of 4.5 or more
    "#0087af": ("#006a8a", "#3fb4dc"),
    "#d75f00": ("#ad4c00", "#f08a3c"),
    "#d75f5f": ("#b83232", "#f08080"),
    "#8b8b8b": ("#707070", ""),  # what is dim in HTML
    "#808080": ("", "#909090"),
}

SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
aria-labelledby="{unique_id}-title">
<title id="{unique_id}-title">TITLE</title>
<style>
.{unique_id}-matrix {{ font: {char_height}px FONT; }}
.{unique_id}-paper {{ fill: PAPER; }}
{styles}
@media (prefers-color-scheme: dark) {{
.{unique_id}-paper {{ fill: NIGHT; }}
DARK}}
</style>
<rect class="{unique_id}-paper" width="100%" height="100%"/>
<g transform="translate(9, 25)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0; color: {foreground}; background: {background}; }}
pre {{ width: max-content; max-width: 100%; box-sizing: border-box; overflow-x: auto; margin: 0 auto;
  padding: 1rem; font: clamp(11px, 1.9vw, 16px)/1.35 FONT; }}
{stylesheet}
@media (prefers-color-scheme: dark) {{
body {{ color: INK; background: NIGHT; }}
DARK}}
</style>
</head>
<body>
<pre tabindex="0">{code}</pre>
</body>
</html>
"""


def save(heading, pages, path, title):
    """Write what was printed -> the files. pages: name -> blocks, each a list of what `report` makes; 80 columns wide.

    FILE.svg becomes a file for each page, FILE-NAME.svg, with the heading above; a page of more than LINES lines goes
    on in FILE-NAME-b.svg and so on, and no block is torn apart. FILE.html is one page of all. ValueError for another
    suffix.
    """
    path = Path(path)
    if path.suffix.lower() == ".html":
        everything = [renderable for blocks in pages.values() for block in blocks for renderable in block]
        return [_write(path, _html([heading, "", *everything], title))]
    if path.suffix.lower() != ".svg":
        raise ValueError(f"path={str(path)!r} is no picture this can write: end it in .svg or .html")
    files = []
    for page, blocks in pages.items():
        for letter, sheet in zip(ascii_lowercase, _sheets(blocks), strict=False):
            name = page if letter == "a" else f"{page}-{letter}"
            file = path.with_name(f"{path.stem}-{name}{path.suffix}")
            files.append(_write(file, _svg([heading, "", *sheet], title, f"part-{name}")))
    return files


def _sheets(blocks):
    """The blocks of a page in sheets of at most LINES lines, or of one block."""
    sheet, used = [], 0
    for block in blocks:
        lines = _recorded(block).export_text().count("\n")
        if used > TITLE and used + lines > LINES:
            yield sheet
            sheet, used = [], 0
        sheet, used = [*sheet, *block], used + lines
    yield sheet


def _write(path, text):
    write_text(path, "\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    return str(path)


def _svg(page, title, name):
    def export(theme, code):
        return _recorded(page).export_svg(title=title, theme=theme, code_format=code, unique_id=name)

    ends = '<text [^>]*>\\n</text>| clip-path="[^"]*"'  # of lines; a text that fits its line needs no clipping
    svg = re.sub(ends, "", _both(export, SVG, "{styles}", title))
    return re.sub(r'(?<=[" ]\d{3}\.\d)\d+|(?<=[" ]\d{4}\.\d)\d+', "", svg)  # 757.5999999999999


def _html(page, title):
    def export(theme, code):
        return _recorded(page).export_html(theme=theme, code_format=code)

    return _both(export, HTML, "{stylesheet}", title)


def _recorded(page):
    screen = Console(
        file=StringIO(), record=True, width=report.WIDTH, force_terminal=True, color_system="256", no_color=False,
        force_jupyter=False, legacy_windows=False, markup=False, highlight=False, emoji=False,
    )  # fmt: skip
    for renderable in page[: -1 if page[-1] == "" else None]:
        screen.print(renderable)
    return screen


def _both(export, code, styles, title):
    """The export in LIGHT, with the styles of DARK for who has set that."""
    dark = _inked(export(DARK, styles + "\n"), 1)
    paper, night, ink = LIGHT.background_color.hex, DARK.background_color.hex, DARK.foreground_color.hex
    text = _inked(export(LIGHT, code), 0)
    head = text.partition("</style>")[0]
    for name, value in {"FONT": FONT, "PAPER": paper, "NIGHT": night, "INK": ink, "DARK": dark}.items():
        text = text.replace(name, value, head.count(name))
    return text.replace("TITLE", escape(title), 1)


def _inked(text, which):
    for ink, inks in INKS.items():
        text = text.replace(ink, inks[which] or ink)
    return text
