"""The HBM bill by source line: what the CPU engine counts at each place of a kernel's source, kept apart."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field

from ..opened import Opened
from .ledger import Bill, Count
from .listed import drawing


@dataclass
class Kernel:
    """One kernel: `functions` are itself and the device functions it calls, `calls` those calls (Function and Call of
    engine/rewrite.py), `counts` maps (file, line) to
    {tensor: Count}, where tensors are called as the kernel calls its parameters."""

    functions: list
    calls: list = field(default_factory=list)
    counts: dict = field(default_factory=dict)

    name = property(lambda self: self.functions[0].name)

    def at(self, function):
        """{line: {tensor: Count}} of the lines of one function that touch HBM."""
        return {line: tensors for (file, line), tensors in self.counts.items() if function.holds(file, line)}

    def total(self):
        """{tensor: Count} of all lines."""
        total = defaultdict(Count)
        for tensors in self.counts.values():
            for tensor, count in tensors.items():
                total[tensor] += count
        return dict(total)

    def callers(self, function, tensor):
        """The (function, line) pairs whose call hands `tensor` on to a device function, as far as names tell."""
        kernel = self.functions[0]
        names = {(kernel, tensor)}  # what the tensor is called in each function
        found, before = set(), None
        while len(names) != before:
            before = len(names)
            for call in self.calls:
                for parameter, name in call.given:
                    if (call.caller, name) in names:
                        names.add((call.callee, parameter))
                        found.add((call.callee, call.caller, call.line))
        places = {(caller, line) for callee, caller, line in found if callee == function}
        places = places or {(call.caller, call.line) for call in self.calls if call.callee == function}
        return sorted(places, key=lambda place: (self.functions.index(place[0]), place[1]))

    def inside(self, function):
        """{tensor: Count} of a device function and of those that it alone calls with the tensor."""
        total = defaultdict(Count)
        for tensors in self.at(function).values():
            for tensor, count in tensors.items():
                total[tensor] += count
        for callee in {call.callee for call in self.calls if call.caller == function}:
            for tensor, count in self.inside(callee).items():
                if {caller for caller, _ in self.callers(callee, tensor)} == {function}:
                    total[tensor] += count
        return dict(total)

    def through(self, function):
        """{line: [(device function, tensor, Count, lines that share it), …]}: what the calls in a function touch."""
        lines = defaultdict(list)
        for callee in self.functions[1:]:
            for tensor, count in self.inside(callee).items():
                places = self.callers(callee, tensor)
                if {caller for caller, _ in places} == {function}:
                    for _, line in places:
                        lines[line].append((callee, tensor, count, [at for _, at in places if at != line]))
        return dict(lines)


class Lines:
    """What `lines` counted: `kernels` lists each Kernel in the order of the first launch."""

    def __init__(self):
        self.kernels = []

    @property
    def bill(self):
        """The sums of the lines, as a Bill: equal to what a ledger counts of the same launches."""
        bill = Bill()
        for kernel in self.kernels:
            bill._add(kernel.name, kernel.total())
        return bill

    def _add(self, program, counts):
        kernel = next((k for k in self.kernels if k.functions[0] == program.texts[0]), None)
        if kernel is None:
            kernel = Kernel([program.texts[0]])
            self.kernels.append(kernel)
        for mine, theirs in ((kernel.functions, program.texts), (kernel.calls, program.calls)):
            mine += [one for one in dict.fromkeys(theirs) if one not in mine]
        for tensor, (itemsize, of_site) in counts.items():
            for site, number in zip(program.sites, of_site, strict=False):
                if number:
                    here = kernel.counts.setdefault((site.file, site.line), {})
                    here[tensor] = here.get(tensor, Count()) + Count(**{site.kind: int(number)}, itemsize=itemsize)

    def to_json(self):
        """A line of source that touches HBM, and what it touches, in each row."""
        rows = []
        for kernel in self.kernels:
            for function in kernel.functions:
                for line, tensors in sorted(kernel.at(function).items()):
                    where = {"kernel": kernel.name, "function": function.name, "line": line}
                    text = function.source.splitlines()[line - function.first].strip()
                    counts = {tensor: asdict(count) for tensor, count in tensors.items()}
                    called = {
                        tensor: [[caller.name, at] for caller, at in kernel.callers(function, tensor)]
                        for tensor in tensors
                        if function != kernel.functions[0]
                    }
                    rows.append({**where, "source": text, "tensors": counts} | ({"called": called} if called else {}))
        return json.dumps(rows, indent=1)

    def __rich__(self):
        return drawing(self)

    def __str__(self):
        from ..report import to_text

        return to_text(self)

    def __repr__(self):
        of = ", ".join(kernel.name for kernel in self.kernels) or "nothing"
        return f"<Lines of {of}: {self.bill.total_bytes:,} bytes>"


_open = Opened("listings")


def lines():
    """Count the loads and stores of each source line: `with lines() as counted: ...; print(counted)` -> Lines.

    Launches in the body run on the CPU engine, which alone knows the lines, where nobody names a device; one on another
    device is refused (ValueError). The lines of a kernel sum to its bill. They stay readable after the body, also where
    the body raised.
    """
    return _open(Lines())


def active():
    """Whether lines are counted in this thread."""
    return bool(_open)


def record(program, counts):
    """Enter one launch of a rewritten kernel. counts: tensor -> (itemsize, how often each of program.sites)."""
    for counted in _open:
        counted._add(program, counts)
