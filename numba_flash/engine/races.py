"""Where a barrier is missing that would part two accesses: between them, or at the end of the loop around them.

A race is of one phase, the time between two barriers. Where a kernel cannot come from one access to the other without
passing a barrier in between, its other way is through the end of the loop: one of the threads is a turn ahead.
"""

import ast
from functools import lru_cache

from .rewrite import definition_in


def loop_without_barrier(program, site, other):
    """(the line of the loop whose end lacks a barrier, whether `site` is what a thread does a turn ahead), or None
    where it is missing between the two, or where a device function is called from several lines.
    """
    here, there = places(program, program.texts[0], site), places(program, program.texts[0], other)
    if len(here) != 1 or len(there) != 1:
        return None
    early, late = sorted(here + there, key=lines_of)
    before, after = blocks(early), blocks(late)
    common = [one for one, same in zip(before, after, strict=False) if one == same]
    loops = [node for _, node, _ in common if isinstance(node, ast.For | ast.While)]
    parted = [path[len(common)][:2] for path in (before, after) if len(path) > len(common)]
    in_two_branches = len(parted) == 2 and parted[0] == parted[1]
    if not loops or in_two_branches or not any(
        lines_of(early) < lines_of(place) < lines_of(late) and blocks(place)[-1] in before + after
        for barrier in program.barriers for place in places(program, program.texts[0], barrier)
    ):  # fmt: skip
        return None
    return loops[-1].lineno, early == here[0]


def places(program, function, site):
    """The ways from a function to a site: ((function, line), (the device function called there, line), …)."""
    if function.holds(site.file, site.line):
        return [((function, site.line),)]
    calls = [call for call in dict.fromkeys(program.calls) if call.caller == function]
    return [((function, call.line), *rest) for call in calls for rest in places(program, call.callee, site)]


def lines_of(place):
    return [line for _, line in place]


def blocks(place):
    """The blocks of statements around a place, from the outermost: (the calls that lead there, statement, its part).

    The condition of a `while` belongs to its body: it is asked in each turn.
    """
    found = []
    for depth, (function, line) in enumerate(place):
        node, calls = tree_of(function), place[:depth]
        while node is not None:
            inside = next(((part, one) for part in ("body", "orelse") for one in getattr(node, part, ())
                           if one.lineno <= line <= one.end_lineno), None)  # fmt: skip
            if inside or isinstance(node, ast.While):
                found.append((calls, node, inside[0] if inside else "body"))
            node = inside and inside[1]
    return found


@lru_cache(maxsize=64)
def tree_of(function):
    tree = definition_in(function.source)
    ast.increment_lineno(tree, function.first - 1)
    return tree
