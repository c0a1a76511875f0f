"""What is open in this thread, of one kind: ledgers, listings, recordings, records of allocations."""

import contextlib
import contextvars


class Opened:
    """`with opened(one):` has `one` among those that are open. They nest, and each thread has its own."""

    def __init__(self, kind):
        self.all = contextvars.ContextVar(f"open {kind}", default=())

    @contextlib.contextmanager
    def __call__(self, one):
        self.all.set((*self.all.get(), one))
        try:
            yield one
        finally:
            self.all.set(tuple(other for other in self.all.get() if other is not one))

    def __iter__(self):
        return iter(self.all.get())

    def __bool__(self):
        return bool(self.all.get())
