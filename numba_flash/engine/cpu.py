"""The CPU engine: runs a kernel's own source, compiled by Numba, one CUDA thread after another.

It is stricter than a GPU. Memory that nobody wrote is NaN, and a bad index, a divergent barrier or too much shared
memory is an error that names the line, the block and the thread. In strict mode races and reads of unwritten memory are
errors too.

What it does not model: a thread runs until its next barrier, so one that spins until another thread writes a flag
spins forever (Ctrl-C stops it); fences order nothing here, so strict mode calls a race what a fence and an atomic make
safe between blocks; registers are not limited. A thread that returns before a barrier is refused, although GPUs since
Volta let the others pass.
"""

import contextlib
import contextvars
import math
import re
import threading
import warnings
import weakref

import numba
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaError, NumbaWarning

from ..errors import (
    BarrierDivergence,
    KernelError,
    OutOfBounds,
    RaceDetected,
    SharedMemoryError,
    UninitializedRead,
    Unsupported,
)
from ..hbm import lines
from ..report import progress
from . import access, cache, races, recorder
from .access import State, Tensor
from .memory import free_host_bytes, refuse_if_too_large
from .model import DYNAMIC_SHARED, STATIC_SHARED
from .rewrite import function_of, rewrite

_programs = weakref.WeakKeyDictionary()  # Python function -> Program
_recorded_programs = weakref.WeakKeyDictionary()
_modules = {}  # rewritten source -> namespace
_fresh = {}  # id of an array made by `empty` and not yet filled -> weak reference to it

POISON = 0xFF  # NaN in every float type
INTEGER_POISON = 0xA5
WORKER_STACK = 64 * 2**20  # the compiler recurses deeply, and some systems give threads half a MiB


_orders = contextvars.ContextVar(
    "random number generator for the order of blocks, and whether of threads", default=None
)


@contextlib.contextmanager
def shuffled_blocks(seed, *, threads=False):
    """Launches in the body run their blocks in a random order, drawn from `seed`: a GPU promises none.

    threads: so do the threads of a block, from one barrier to the next.
    """
    token = _orders.set((np.random.default_rng(seed), threads))
    try:
        yield
    finally:
        _orders.reset(token)


def run(kernel, grid, block, args, shared_bytes=0, strict=False, thread_order=None, block_order=None):
    """Run a kernel over a grid; returns {parameter: (itemsize, loads, stores, atomics)} for its array arguments.

    `thread_order` and `block_order` are permutations of the threads of a block and the blocks of the grid, for checks
    that a kernel's result does not depend on them; `block_order` may hold some of the blocks alone. Raises the errors
    of `numba_flash.errors`.
    """
    if numba.config.DISABLE_JIT:
        raise KernelError("NUMBA_DISABLE_JIT is set, and the CPU engine is compiled: unset it")
    recorded = recorder.active()
    program = program_of(function_of(kernel), recorded)
    if recorded:
        recorder.check(program.name, program.parameters, args, strict)
    check_shared(program, shared_bytes)
    state = State()
    counts = {}
    histories = histories_of(args) if strict else {}
    arguments = [argument(value, index, name, program, state, counts, histories, recorded) for index, (name, value) in
                 enumerate(zip(program.parameters, args, strict=True))]  # fmt: skip
    memory = block_memory(program, block, shared_bytes, state, len(arguments), strict, recorded)
    blocks = grid[0] * grid[1] * grid[2]
    if _orders.get():
        draw, threads = _orders.get()
        block_order = draw.permutation(blocks) if block_order is None else block_order
        thread_order = draw.permutation(math.prod(block)) if threads and thread_order is None else thread_order
    order = np.empty(0, np.int64) if block_order is None else np.asarray(block_order, np.int64)
    blocks = len(order) or blocks
    call = (0, blocks, order, thread_table(block, thread_order), *block, *grid, state, *memory,
            *program.integers.values(), *arguments)  # fmt: skip
    function = compiled(program, call)
    log = recorder.Recorder(program, state, [position(n, grid) for n in (order if order.size else range(blocks))]) \
        if recorded else None  # fmt: skip
    run_blocks(function, call, program, state, grid, block, log)
    if state.words[access.KIND]:
        shapes = [v.shape if isinstance(v, np.ndarray) and v.flags.c_contiguous else () for v in args]
        shapes += [resolved(array.shape, program) for array in (program.shared | program.local).values()]
        raise failure(program, state.words, grid, block, shapes)
    lines.record(program, counts)
    if log:
        log.end(function_of(kernel), grid, block, recorder.arrays(program, args, memory))
    kinds = np.array([site.kind for site in program.sites])
    return {name: (itemsize, *(int(count[kinds == kind].sum()) for kind in ("loads", "stores", "atomics")))
            for name, (itemsize, count) in counts.items()}  # fmt: skip


def run_blocks(function, call, program, state, grid, block, log):
    """Run the compiled code over the grid, block by block where there is a log to take, until `state` has an error.

    Raises KernelError for what compiled Python raises by itself.
    """
    blocks = call[1]
    for turns in [(turn, turn + 1) for turn in range(blocks)] if log else [(0, blocks)]:
        try:
            execute(function, (*turns, *call[2:]), state, program.name, blocks)
        except (IndexError, ValueError, ArithmeticError, TypeError) as error:
            at = [position(int(state.words[w]), n) for w, n in ((access.NOW_BLOCK, grid), (access.NOW_THREAD, block))]
            raise KernelError(f"{program.name}, block {at[0]}, thread {at[1]}: {error}", kernel=program.name,
                              block=at[0], thread=at[1]) from error  # fmt: skip
        if state.words[access.KIND]:
            return
        if log:
            log.take()


def program_of(function, recorded=False):
    """The rewritten kernel. Kernels of one factory share the text and differ in their integers."""
    programs = _recorded_programs if recorded else _programs
    if function not in programs:
        programs[function] = rewrite(function, recorder.RecordingRewriter if recorded else None)
    return programs[function]


# --- memory -----------------------------------------------------------------------------------------------------------


def argument(value, index, name, program, state, counts, histories, recorded):
    if not isinstance(value, np.ndarray):
        return value
    count = np.zeros(max(1, len(program.sites)), np.int64)
    counts[name] = value.itemsize, count
    return Tensor(value, state, index, "global", count, *histories.get(index, ()), recorded=recorded)


def histories_of(args):
    """Strict mode: {position of an array argument: (shadow, base)}. Arrays that overlap share one history."""
    arrays = {i: (*np.lib.array_utils.byte_bounds(a), a) for i, a in enumerate(args) if isinstance(a, np.ndarray)}
    needed = sum(4 * access.SHADOW_WORDS * ((high - low) // a.itemsize) for low, high, a in arrays.values())
    refuse_if_too_large(needed, "the history of every element that strict mode keeps", free_host_bytes())
    groups = []
    for i in sorted(arrays, key=lambda i: arrays[i][:2]):
        low, high, array = arrays[i]
        if groups and low < groups[-1]["high"]:
            group = groups[-1]
            if array.itemsize != group["itemsize"] or (low - group["low"]) % array.itemsize:
                raise Unsupported("two arguments overlap in memory with elements of different sizes: "
                                  "strict mode cannot follow that; pass separate arrays")  # fmt: skip
            group["high"] = max(group["high"], high)
            group["members"].append(i)
        else:
            groups.append({"low": low, "high": high, "itemsize": array.itemsize, "members": [i]})
    histories = {}
    for group in groups:
        shadow = new_shadow((group["high"] - group["low"]) // group["itemsize"])
        shadow[:, access.WRITTEN] = 0
        for i in group["members"]:
            low, _, array = arrays[i]
            untouched = unwritten(array)
            if untouched is not None:
                first = (low - group["low"]) // array.itemsize
                shadow[first : first + len(untouched)][untouched, access.WRITTEN] = -1
            histories[i] = shadow, group["low"]
    return histories


def new_shadow(elements):
    return np.full((max(1, elements), access.SHADOW_WORDS), -1, np.int32)


def unwritten(array):
    """Which elements between the first and the last of `array` still hold the poison of `empty`, or None: see there."""
    root = array
    while root is not None and id(root) not in _fresh:
        root = root.base
    if root is None or _fresh[id(root)]() is not root or root.dtype != array.dtype:
        return None
    low, high = np.lib.array_utils.byte_bounds(array)
    start, _ = np.lib.array_utils.byte_bounds(root)
    elements = root.reshape(-1)[(low - start) // root.itemsize : (high - start) // root.itemsize]
    return (elements.view(np.uint8).reshape(-1, root.itemsize) == poison_byte(root.dtype)).all(axis=1)


def poison_byte(dtype):
    return INTEGER_POISON if dtype.kind in "iu" else POISON


def empty(shape, dtype):
    """An array whose floats are NaN. Strict mode knows which elements nobody has written: those that still hold the
    poison, which no arithmetic gives. (Integers of 1 or 2 bytes hold any value, so they are not followed.)
    """
    array = np.empty(shape, dtype)
    if array.dtype.kind == "b":
        array.fill(False)
    if array.dtype.kind == "b" or not array.size:
        return array
    array.reshape(-1).view(np.uint8).fill(poison_byte(array.dtype))
    if array.itemsize >= 4:
        key = id(array)
        _fresh[key] = weakref.ref(array, lambda _: _fresh.pop(key, None))
    return array


def resolved(shape, program):
    return tuple(program.integers.get(size, size) for size in shape)


LOCAL = 512 * 1024  # bytes of local memory that CUDA gives a thread


def check_local(program):
    for array in program.local.values():
        needed = math.prod(resolved(array.shape, program)) * array.dtype.itemsize
        if needed > LOCAL:
            raise Unsupported(
                f"{program.name} asks for {needed:,} B of local memory per thread ({array.name}); there are {LOCAL:,}",
                kernel=program.name,
            )


def check_shared(program, shared_bytes):
    arrays = [(array, resolved(array.shape, program)) for array in program.shared.values()]
    static = sum(math.prod(shape) * array.dtype.itemsize for array, shape in arrays)
    check_local(program)
    if static > STATIC_SHARED:
        listed = ", ".join(f"{array.name}{list(shape)}" for array, shape in arrays if 0 not in shape)
        raise SharedMemoryError(
            f"{program.name} asks for {static:,} B of shared memory per block ({listed}); "
            f"the device has {STATIC_SHARED:,} B: use smaller tiles",
            kernel=program.name,
        )
    if static + shared_bytes > DYNAMIC_SHARED:
        raise SharedMemoryError(
            f"{program.name} asks for {static + shared_bytes:,} B of static and dynamic shared memory per block; "
            f"the device has {DYNAMIC_SHARED:,} B: lower shared_bytes={shared_bytes}",
            kernel=program.name,
        )


def block_memory(program, block, shared_bytes, state, first_tag, strict, recorded):
    """The shared arrays of one block and the local arrays of its threads, as hidden arguments."""
    dynamic = np.empty(shared_bytes, np.uint8)
    dynamic_dtypes = {array.dtype for array in program.shared.values() if 0 in array.shape}
    if strict and len(dynamic_dtypes) > 1:
        raise Unsupported(
            f"{program.name} uses dynamic shared memory as arrays of different dtypes, which strict mode cannot follow",
            kernel=program.name,
        )
    dynamic_shadow = new_shadow(shared_bytes) if strict and dynamic_dtypes else None
    memory = []
    threads = math.prod(block)
    for tag, (hidden, array) in enumerate((program.shared | program.local).items(), first_tag):
        shape = resolved(array.shape, program)
        space = "shared" if hidden in program.shared else "local"
        if space == "shared" and 0 in shape:
            data = dynamic[: shared_bytes // array.dtype.itemsize * array.dtype.itemsize].view(array.dtype)
            shadow = dynamic_shadow
        else:
            data = np.empty(shape if space == "shared" else (threads, *shape), array.dtype)
            shadow = new_shadow(data.size) if strict else None
        memory.append(Tensor(data, state, tag, space, shadow=shadow, base=data.ctypes.data, recorded=recorded))
    return memory


def thread_table(block, order=None):
    """One row per thread, in the order they are stepped: x, y, z, number."""
    z, y, x = np.indices(block[::-1]).reshape(3, -1)
    table = np.stack([x, y, z, np.arange(x.size)], axis=1).astype(np.int64)
    return table if order is None else np.ascontiguousarray(table[order])


# --- compiling and running --------------------------------------------------------------------------------------------


def compiled(program, call):
    """The machine code for these argument types, from this process, the disk, or the compiler."""
    signature = tuple(numba.typeof(value) for value in call)
    namespace = _modules.get(program.source)
    if namespace and signature in namespace["run"].overloads:
        return namespace["run"]
    path = cache.write(program.name, program.source)
    was_cached = path is not None and cache.holds(path)
    if was_cached and not cache.is_intact(path):
        cache.forget(path)
        path, was_cached = cache.write(program.name, program.source), False
    try:
        return in_worker(lambda: build(program, signature, path), f"compiling {program.name}")
    except (NumbaError, NotImplementedError) as error:
        raise translated(program, error) from error
    except cache.DAMAGE:
        if not was_cached:
            raise
        cache.forget(path)
        path = cache.write(program.name, program.source)
        return in_worker(lambda: build(program, signature, path), f"compiling {program.name}")


def build(program, signature, path):
    namespace = _modules.get(program.source) or cache.module_from(program.name, program.source, path)
    with warnings.catch_warnings(), lightly_optimised():
        warnings.simplefilter("ignore", NumbaWarning)  # about our code, not the learner's
        namespace["run"].compile(signature)
    _modules[program.source] = namespace
    if path and sum(namespace["run"].stats.cache_misses.values()):
        cache.seal(path)
    return namespace["run"]


@contextlib.contextmanager
def lightly_optimised():
    """Numba compiles at LLVM's level 1, not 3, in the body: this code is as fast then, and there a sixth sooner."""
    with global_compiler_lock:
        level = numba.config.OPT
        numba.config.OPT = type(level)(min(level, 1))
        try:
            yield
        finally:
            numba.config.OPT = level


def execute(function, call, state, name, blocks):
    """Run compiled code over the grid; an interrupt stops it at the next turn of a loop or the next barrier."""

    def stop():
        state.words[access.STOP] = 1

    in_worker(lambda: function(*call), f"running {name}", blocks, lambda: int(state.words[access.TURN]), stop)


def in_worker(work, description, total=None, turn=None, stop=None):
    """`work()`, done by another thread, so that Ctrl-C and the progress bar work in this one.

    `stop` makes the work end soon, and an interrupt waits for that. Without it, the compiler's case, the interrupt
    leaves the work to finish by itself.
    """
    done, outcome = threading.Event(), []

    def run():
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))
        finally:
            done.set()

    usual = threading.stack_size(WORKER_STACK)
    try:
        threading.Thread(target=run, daemon=stop is not None).start()
    finally:
        threading.stack_size(usual)
    try:
        if not done.wait(0.5):
            shown = 0
            with progress(description, total, after=1.5) as advance:
                while not done.wait(0.1):
                    if turn:
                        now = turn()
                        advance(now - shown)
                        shown = now
    except BaseException:
        if stop:
            stop()
            done.wait()
        raise
    result, error = outcome[0]
    if error:
        raise error
    return result


# --- errors -----------------------------------------------------------------------------------------------------------


def translated(program, error):
    """Numba's typing error in the learner's own terms: the kernel's line and what Numba said about it."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    origin = None
    for line in lines:
        for number in re.findall(r"\.py.*?(?:line |\()(\d+)", line):
            origin = program.lines.get(int(number), origin)
    causes = [
        line.partition("Error: ")[2] for line in lines if re.match(r"(- )?\w*(Typing|Lowering|Type)Error: ", line)
    ]
    noise = ("Failed in", "During:", "File ", "Overload ", "There ", "- Of which", "Use of", "Enable", "This error")
    plain = [line for line in lines if not line.startswith(noise)]
    said = (causes or plain or lines)[-1 if causes else 0].replace("nf.Tensor", "array")
    where = f" ({origin.file}, line {origin.line})" if origin else ""
    return Unsupported(f"{program.name}{where} cannot be compiled: {said}", kernel=program.name,
                       file=origin and origin.file, line=origin and origin.line)  # fmt: skip


def position(number, extent):
    return number % extent[0], number // extent[0] % extent[1], number // (extent[0] * extent[1])


def failure(program, words, grid, block, shapes):
    """The error that the kernel recorded."""
    w = [int(word) for word in words]
    kind = w[access.KIND]
    where = {"block": position(w[access.BLOCK], grid), "thread": position(w[access.THREAD], block)}
    if kind == access.DIVERGENCE:
        return divergence(program, w, block, where)
    site = program.sites[w[access.SITE]]
    names = [*program.parameters, *(array.name for array in (program.shared | program.local).values())]
    tensor = names[w[access.TENSOR]]
    details = dict(kernel=program.name, file=site.file, line=site.line, tensor=tensor, **where)
    place = f"{program.name} ({site.file}, line {site.line}), block {where['block']}, thread {where['thread']}"
    if kind == access.OUT_OF_BOUNDS:
        return OutOfBounds(
            f"{place}: index {w[access.INDEX]} of {tensor}, axis {w[access.AXIS]}, which has size {w[access.SIZE]}",
            **details,
        )
    if kind == access.READ_ONLY:
        return OutOfBounds(f"{place}: a store to {tensor}, which is read-only: pass a writable array", **details)
    element = element_name(tensor, w[access.INDEX], shapes[w[access.TENSOR]])
    if kind == access.UNINITIALIZED:
        return UninitializedRead(f"{place}: reads {element}, which nothing has written", **details)
    return RaceDetected(f"{place}: {race(program, w, site, element, grid, block)}", **details)


def race(program, w, site, element, grid, block):
    """What two threads do to an element, and what would part them."""
    other = program.sites[w[access.OTHER_SITE]]
    verbs = {"loads": "reads", "stores": "writes", "atomics": "updates"}
    does, did = verbs[site.kind], f"{verbs[other.kind]} in line {other.line}"
    if w[access.OTHER_THREAD] < 0:
        return (f"{does} {element}, which block {position(w[access.OTHER_BLOCK], grid)} {did} in the same launch: "
                "blocks run in any order, so give each its own elements, or use cuda.atomic")  # fmt: skip
    who = f"which thread {position(w[access.OTHER_THREAD], block)}"
    if site == other:
        return f"{does} {element}, {who} {did} too: give each thread its own elements, or use cuda.atomic"
    if (found := races.loop_without_barrier(program, site, other)) is None:
        return f"{does} {element}, {who} {did} with no barrier between: put cuda.syncthreads() between the two"
    line, is_ahead = found
    missing = f"a barrier is missing at the end of the loop in line {line}"
    if is_ahead:
        return f"in its next turn of the loop it {does} {element}, {who} {did}: {missing}"
    return f"{does} {element}, {who} {did} in its next turn of the loop: {missing}"


def element_name(tensor, number, shape):
    """ "Q_i[1, 2]" for element `number` of a contiguous array; without a shape only "an element of Q_i"."""
    if not shape:
        return f"an element of {tensor}"
    if 0 in shape:  # dynamic shared memory, whose size the launch says
        return f"{tensor}[{number}]"
    index = np.unravel_index(number % math.prod(shape), shape)  # local arrays of all threads lie one after another
    return f"{tensor}[{', '.join(map(str, index))}]"


def divergence(program, w, block, where):
    def at(number):
        return "has returned" if number < 0 else f"waits at the barrier in line {program.barriers[number].line}"

    reached = [program.barriers[n] for n in (w[access.SITE], w[access.OTHER_SITE]) if n >= 0]
    other = position(w[access.OTHER_THREAD], block)
    return BarrierDivergence(
        f"{program.name} ({reached[0].file}, line {reached[0].line}), block {where['block']}: thread {where['thread']} "
        f"{at(w[access.SITE])}, thread {other} {at(w[access.OTHER_SITE])}: every thread of a block must reach the same "
        "barriers (guard the work between them, not the barrier)",
        kernel=program.name,
        file=reached[0].file,
        line=reached[0].line,
        **where,
    )
