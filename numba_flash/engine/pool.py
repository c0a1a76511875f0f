"""GPU memory that is used again.

The driver needs 25 µs for a new block, as long as a small kernel runs, and to free one it waits for every kernel. So a
block comes back here when the last array in it goes, and the next array of such a size has it. That is safe on the
default stream: a kernel that still writes to the array that went is finished before the next kernel begins.
"""

import weakref

from numba import cuda
from numba.cuda.cudadrv import driver

LARGEST = 2**28  # bytes of a block that is kept
KEPT = 2**30  # bytes that are kept in all


class Pool:
    """The blocks of one context: those in use, by address, and those that no array uses, by size."""

    def __init__(self, context):
        self.context = weakref.proxy(context)
        self.used, self.spare, self.kept = {}, {}, 0

    def block(self, nbytes):
        """Memory for `nbytes` or more, to be the gpu_data of arrays. Raises what the driver raises."""
        step = max(512, 1 << nbytes.bit_length() - 3)  # sizes that differ by less than a quarter share their blocks
        size = -(-nbytes // step) * step if nbytes <= LARGEST else nbytes
        blocks = self.spare.setdefault(size, [])
        try:
            memory = blocks.pop()
            self.kept -= size
            address = int(memory.device_pointer)
        except (IndexError, ReferenceError):  # there is none; the context was reset, and what was kept went with it
            memory = self.context.memalloc(size)
            address = int(memory.device_pointer)

        def come_back():
            self.used.pop(address, None)
            if size <= LARGEST and self.kept + size <= KEPT:
                self.kept += size
                blocks.append(memory)

        self.used[address] = driver.AutoFreePointer(self.context, memory.device_pointer, nbytes, finalizer=come_back)
        return self.used[address].own()

    def clear(self):
        """Give what is kept back to the driver."""
        for blocks in self.spare.values():
            blocks.clear()
        self.kept = 0
        self.context.memory_manager.deallocations.clear()


def pool():
    """The Pool of the current context."""
    context = cuda.current_context()
    try:
        return context.extras["numba_flash"]
    except KeyError:
        return context.extras.setdefault("numba_flash", Pool(context))
