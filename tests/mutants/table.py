"""The table at the end of `pytest -m mutants`."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def pytest_terminal_summary(terminalreporter):
    """Which test killed which fault, and what a loose check would have said."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    rows = [value for r in reports for name, value in r.user_properties if name == "mutant"]
    if not rows:
        return
    from numba_flash.course.faults import MUTANTS  # not at the top: conftest.py imports this before it chooses a cache

    order = [(mutant.file, mutant.fault.name) for mutant in MUTANTS]
    rows.sort(key=lambda row: order.index((row[0], row[1])))
    terminalreporter.ensure_newline()
    console = Console(width=80, markup=False, highlight=False)
    for file in dict.fromkeys(row[0] for row in rows):
        table = Table(title=f"numba_flash/{file}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column, width in (("fault", 20), ("stands for", 22), ("killed by", 22), ("loose", 6)):
            table.add_column(column, width=width)
        for _, *row, killer, loose in (row for row in rows if row[0] == file):
            table.add_row(*row, killer or "NOTHING", "passes" if loose else "fails")
        console.print(table)
    killed, loose = sum(bool(row[3]) for row in rows), sum(row[4] for row in rows)
    console.print(f"{killed} of {len(rows)} mutants killed. {loose} of {len(rows)} would pass allclose(atol=1e-2)")
