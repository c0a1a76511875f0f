"""The player as one page: the template's files and the recorded frames, in a single HTML file that needs no network."""

import json
import math
from importlib import resources
from string import Template

import numpy as np

from ..engine.model import STATIC_SHARED
from ..files import write_text
from .paper import ALGORITHMS
from .play import matrix, place


def write(plays, path, speed=4):
    """Write the page of one or two Plays -> its size in bytes. The same plays give the same bytes."""
    text = page(plays, speed)
    write_text(path, text)
    return len(text.encode())


def page(plays, speed=4):
    """The HTML text."""
    folder = resources.files(__package__)
    files = {kind: folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")}
    title = "Tiles on the move: " + " beside ".join(play.stage for play in plays)
    content = {
        "facts": plays[0].facts.partition(", float32")[0],
        "speed": speed,
        "sram": STATIC_SHARED,
        "scale": max(max(play.bill.total_bytes, play.ideal.total_bytes) for play in plays),
        "plays": [data(play) for play in plays],
    }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("</", "<\\/")
    return Template(files["html"]).substitute(title=title, css=files["css"], js=files["js"], data=text)


def data(play):
    """What the page needs of a Play, as JSON has it."""
    return {
        "stage": play.stage,
        "facts": play.facts,
        "n": play.n,
        "d": play.d,
        "row": play.row,
        "sides": play.sides,
        "chip": "S" not in play.matrices(),
        "itemsize": play.out.itemsize,
        "read": play.bill.read_bytes,
        "written": play.bill.write_bytes,
        "ideal": play.ideal.total_bytes,
        "algorithm": {
            "name": ALGORITHMS[play.stage].name,
            "link": ALGORITHMS[play.stage].link,
            "lines": [{"number": line.number, "text": line.text} for line in ALGORITHMS[play.stage].lines],
        },
        "matrices": [
            {"name": name, "rows": rows, "columns": columns, "queries": name not in "KV"}
            | dict(zip(("tall", "wide"), play.tile(name), strict=True))
            for name, (rows, columns) in play.matrices().items()
        ],
        "kernels": [kernel(launch) for launch in play.record.launches],
        "frames": [frame_of(play, frame) for frame in play.frames],
    }


def kernel(launch):
    source, first = launch.source
    arrays = []
    for array in launch.arrays:
        rows, columns = matrix(array) if array else (0, 0)
        if array and array.space == "local":
            rows, columns = math.prod(launch.block), math.prod(array.shape)
        arrays.append({"name": array.name if array else "", "space": array.space if array else "global",
                       "rows": rows, "columns": columns, "bytes": array.nbytes if array else 0})  # fmt: skip
    return {"name": launch.kernel, "first": first, "source": source, "arrays": arrays}


def frame_of(play, frame):
    arrays = play.launch(frame).arrays
    scores = play.scores(frame)
    return {
        "launch": frame.launch,
        "block": frame.block,
        "phase": frame.phase,
        "lines": frame.lines,
        "algorithm": play.algorithm(frame),
        "turns": frame.turns,
        "says": play.says(frame),
        "touches": [
            {"array": touch.array, "kind": touch.kind, "box": place(touch, arrays[touch.array])}
            | {"elements": touch.elements, "accesses": touch.accesses}
            for touch in frame.touches
        ],
        "scores": [*scores[0], *scores[1]] if scores else None,
        "filled": frame.filled,
        "read": frame.read_bytes,
        "written": frame.write_bytes,
        "row": {name: short(value) for name, value in sorted(frame.row.items())},
    }


def short(value):
    """A float32 in as few digits as tell it apart, and what JSON lacks as text; or each value of a dict."""
    if isinstance(value, dict):
        return {str(key): short(one) for key, one in sorted(value.items())}
    return float(str(np.float32(value))) if math.isfinite(value) else str(value)
