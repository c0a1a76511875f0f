"""Pictures of figures for slides, drawn by matplotlib (the extra `plot`): without a display, the same in every run."""

import logging
import os
from io import BytesIO
from pathlib import Path

from ..files import write_bytes

SUFFIXES = (".png", ".svg", ".pdf")
SLIDE = (12.8, 7.2)  # inches, 16:9
SETTINGS = {"font.size": 13, "axes.titlesize": 14, "figure.titlesize": 17, "svg.hashsalt": "numba_flash"}
SETTINGS |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "hatch.linewidth": 0.7}
UNDATED = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}

PAPER = {"facecolor": "white", "edgecolor": "black", "hatch": "///"}  # of bars; tell apart in black and white, too
OURS = {"facecolor": "#00608a", "edgecolor": "black"}
MORE = {"facecolor": "#bcd9e6", "edgecolor": "black"}
INKS = ("#00608a", "#c04a00", "#555555", "#7a2a86", "#2e7d32")  # of lines
MARKERS = "osD^v"


def missing():
    """Why matplotlib cannot be used, or None where it can."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # that it builds a cache of fonts is no warning
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # built for another NumPy, or spoilt by a setting
        return f"it cannot be loaded ({' '.join(str(error).split()):.200})"
    return None


def refuse():
    """ValueError where there is no matplotlib."""
    if why := missing():
        raise ValueError(f'--plot needs matplotlib, and {why}: python -m pip install "matplotlib>=3.9"')


def save(plot, figures, path):
    """Draw figures by `plot(figures, canvas)`, a function of its module, and write the picture, whole or not at all."""
    refuse()
    from unittest.mock import patch

    import matplotlib
    from matplotlib.figure import Figure

    suffix = Path(path).suffix.lower()
    picture = BytesIO()
    with matplotlib.rc_context(), patch.dict(os.environ):
        os.environ.pop("SOURCE_DATE_EPOCH", None)  # no picture has a date, and matplotlib reads it all the same
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        canvas = Figure(figsize=SLIDE, layout="constrained")
        plot(figures, canvas)
        canvas.savefig(picture, format=suffix[1:], dpi=150, metadata=UNDATED[suffix])
    write_bytes(path, picture.getvalue())


def short(number):
    """A number in three digits or more: 0.94, 41.7, 1,253."""
    return f"{number:,.0f}" if 100 <= number < 1e7 else f"{number:.3g}"


def bars(axes, groups, series, **labels):
    """Bars side by side in each of `groups`, with their values above.

    series: name -> (values, one for each group, None for no bar; the look of its bars). labels: as for `axes.set`.
    """
    wide = 0.8 / len(series)
    for at, (name, (values, look)) in enumerate(series.items()):
        there = {group: value for group, value in enumerate(values) if value is not None}
        places, heights = [group + (at - (len(series) - 1) / 2) * wide for group in there], list(there.values())
        drawn = axes.bar(places, heights, 0.94 * wide, label=name, linewidth=0.8, **look)
        axes.bar_label(drawn, list(map(short, heights)), padding=2, fontsize=10)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.12)
    axes.set(**labels)
