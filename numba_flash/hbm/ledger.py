"""The HBM bill of a piece of code: every load and store of every kernel argument, counted while the kernels run.

One access of one element of a kernel argument by one thread is one load or store. An atomic is its own kind: one read
and one write in bytes. Shared memory and registers are free.
"""

import json
from dataclasses import asdict, dataclass

from ..checks import integer
from ..opened import Opened

KINDS = ("loads", "stores", "atomics")


@dataclass(frozen=True)
class Count:
    """The accesses to one tensor, in elements of `itemsize` bytes. `Count()` adds to any other without changing it."""

    loads: int = 0
    stores: int = 0
    atomics: int = 0
    itemsize: int = 4

    @property
    def elements(self):
        """Elements read and elements written; an atomic does both."""
        return self.loads + self.stores + 2 * self.atomics

    @property
    def read_bytes(self):
        return (self.loads + self.atomics) * self.itemsize

    @property
    def write_bytes(self):
        return (self.stores + self.atomics) * self.itemsize

    def __add__(self, other):
        """The sum, kind by kind. ValueError where both are non-zero and their elements differ in size."""
        if not isinstance(other, Count):
            return NotImplemented
        if self.elements and other.elements and self.itemsize != other.itemsize:
            raise ValueError(
                f"elements of {self.itemsize} and of {other.itemsize} bytes do not add up to one count: "
                "keep a bill for each dtype"
            )
        itemsize = self.itemsize if self.elements else other.itemsize
        return Count(self.loads + other.loads, self.stores + other.stores, self.atomics + other.atomics, itemsize)


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's name, its grid in blocks and its block in threads, each (x, y, z)."""

    kernel: str
    grid: tuple
    block: tuple


class Bill:
    """Loads and stores by kernel and tensor, counted (`ledger`) or predicted (`predict`).

    `kernels` maps kernel name -> tensor name -> Count, in the order of the first launch; tensors are called as the
    kernel calls its parameters. `launches` lists each Launch; it is empty for a prediction and not compared.
    """

    def __init__(self, kernels=None, launches=()):
        self.kernels = {kernel: dict(tensors) for kernel, tensors in (kernels or {}).items()}
        self.launches = list(launches)

    def __getitem__(self, tensor):
        """The Count of one tensor, summed over the kernels. KeyError where no kernel has a tensor of that name."""
        found = [tensors[tensor] for tensors in self.kernels.values() if tensor in tensors]
        if not found:
            there = ", ".join(dict.fromkeys(name for tensors in self.kernels.values() for name in tensors))
            raise KeyError(f"no tensor {tensor!r} in this bill: " + (f"it has {there}" if there else "it is empty"))
        return sum(found, Count())

    def _sum(self, what):
        return sum(getattr(count, what) for tensors in self.kernels.values() for count in tensors.values())

    loads = property(lambda self: self._sum("loads"), doc="Elements loaded, atomics left out.")
    stores = property(lambda self: self._sum("stores"), doc="Elements stored, atomics left out.")
    atomics = property(lambda self: self._sum("atomics"), doc="Atomic operations on one element each.")
    elements = property(lambda self: self._sum("elements"), doc="Elements read and elements written.")
    read_bytes = property(lambda self: self._sum("read_bytes"), doc="Bytes read.")
    write_bytes = property(lambda self: self._sum("write_bytes"), doc="Bytes written.")
    total_bytes = property(lambda self: self.read_bytes + self.write_bytes, doc="Bytes read and written.")

    def _add(self, kernel, tensors):
        mine = self.kernels.setdefault(kernel, {})
        sums = {}
        for tensor, count in tensors.items():
            try:
                sums[tensor] = mine.get(tensor, Count()) + count
            except ValueError as error:
                raise ValueError(f"{kernel}: {tensor}: {error}") from None
        mine |= sums

    def __add__(self, other):
        """Both bills as one. ValueError where a kernel's tensor has elements of another size in the other bill."""
        if not isinstance(other, Bill):
            return NotImplemented
        both = Bill(self.kernels, self.launches + other.launches)
        for kernel, tensors in other.kernels.items():
            both._add(kernel, tensors)
        return both

    def scaled(self, k):
        """This bill `k` times (k >= 0, an integer): of one head for all heads, say. It lists no launches."""
        k = integer("k", k)
        return Bill(
            {
                kernel: {t: Count(k * c.loads, k * c.stores, k * c.atomics, c.itemsize) for t, c in tensors.items()}
                for kernel, tensors in self.kernels.items()
            }
        )

    def _accesses(self):
        return {(k, t): c for k, tensors in self.kernels.items() for t, c in tensors.items() if c.elements}

    def __eq__(self, other):
        """Exact: kernels, tensors, counts and element sizes. What is not accessed equals what is not there."""
        return self._accesses() == other._accesses() if isinstance(other, Bill) else NotImplemented

    __hash__ = None

    def diff(self, other):
        """What differs, a line each: kernel, tensor, kind, the figure here, in `other`, and by how much here exceeds
        it. Empty exactly when the bills are equal."""
        if not isinstance(other, Bill):
            raise TypeError(f"other={other!r} is no Bill: pass what ledger() or predict() gives")
        mine, theirs = self._accesses(), other._accesses()
        lines = []
        for kernel, tensor in mine | theirs:
            a, b = mine.get((kernel, tensor), Count()), theirs.get((kernel, tensor), Count())
            for kind in KINDS:
                x, y = getattr(a, kind), getattr(b, kind)
                if x != y:
                    lines.append(f"{kernel}: {tensor} {kind} {x:,} against {y:,} ({x - y:+,})")
            if a.elements and b.elements and a.itemsize != b.itemsize:
                by = a.itemsize - b.itemsize
                lines.append(f"{kernel}: {tensor} bytes per element {a.itemsize} against {b.itemsize} ({by:+})")
        return lines

    def to_json(self):
        """The bill as JSON text; `from_json` reads it back."""
        kernels = {k: {t: asdict(c) for t, c in tensors.items()} for k, tensors in self.kernels.items()}
        return json.dumps({"kernels": kernels, "launches": [asdict(launch) for launch in self.launches]}, indent=1)

    @classmethod
    def from_json(cls, text):
        """The bill that `to_json` wrote. ValueError where `text` is something else."""
        try:
            read = json.loads(text)
            kernels = {k: {t: Count(**c) for t, c in tensors.items()} for k, tensors in read["kernels"].items()}
            launches = [Launch(x["kernel"], tuple(x["grid"]), tuple(x["block"])) for x in read["launches"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"text={text!r:.60} is no bill ({error}): pass what Bill.to_json wrote") from error
        return cls(kernels, launches)

    def __rich__(self):
        from ..report import bill_table

        return bill_table(counted=self) if self.launches else bill_table(predicted=self)

    def __str__(self):
        from ..report import to_text

        return to_text(self)

    def __repr__(self):
        of = ", ".join(self.kernels) or "nothing"
        return f"<Bill of {of}: {self.elements:,} elements, {self.total_bytes:,} bytes>"


_open = Opened("ledgers")


def ledger():
    """Count every load and store of every launch in the body: `with ledger() as bill: ...` -> Bill.

    Ledgers nest: a launch is counted in each one that is open. Each thread has its own. The bill stays readable after
    the body, also where the body raised. Only kernels launched by `numba_flash.launch` (and `attention`) are counted;
    a plain `kernel[grid, block](...)` is not.
    """
    return _open(Bill())


def active():
    """Whether a ledger is open in this thread."""
    return bool(_open)


def record(kernel, grid, block, counts):
    """Enter one launch in every open ledger.

    `counts` maps tensor -> (itemsize, loads, stores, atomics). ValueError where an earlier launch of a kernel of that
    name had elements of another size in the same tensor.
    """
    launch = Launch(kernel, tuple(map(int, grid)), tuple(map(int, block)))
    tensors = {}
    for tensor, figures in counts.items():
        itemsize, loads, stores, atomics = map(int, figures)
        tensors[tensor] = Count(loads, stores, atomics, itemsize)
    for bill in _open:
        bill._add(kernel, tensors)
        bill.launches.append(launch)
