"""The table at the end of `pytest -m mutants`."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def pytest_terminal_summary(terminalreporter):
    """Which test killed which fault, and what a loose check would have said."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    rows = sorted(value for r in reports for name, value in r.user_properties if name == "mutant")
    if not rows:
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("mutant", "stands for", "killed by", "loose"):
        table.add_column(column, overflow="fold")
    for name, stands_for, killer, loose in rows:
        table.add_row(name, stands_for, killer or "NOTHING", "passes" if loose else "fails")
    loose = sum(row[3] for row in rows)
    terminalreporter.ensure_newline()
    Console(width=80).print(table, markup=False)
    print(f"{len([r for r in rows if r[2]])} of {len(rows)} killed; "
          f"{loose} of {len(rows)} would pass allclose(atol=1e-2)")  # fmt: skip
