"""What this machine has, what is in the way of kernels, and the proof that one runs."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numba
import numpy as np
from numba import cuda

from . import __version__, report
from .engine import cache as kernels
from .engine.launch import device, free_bytes, gpu_count, launch, numpy_conflict
from .errors import KernelError
from .hbm.ledger import Count, ledger
from .hbm.profiler import find_ncu

OK, NOTE, PROBLEM = "ok", "note", "problem"
LOWEST = {"python": (3, 11), "numba": (0, 61), "numpy": (2, 0), "rich": (13, 7), "numba-cuda": (0, 30)}
PACKAGES = ("numba", "llvmlite", "numpy", "rich", "numba-cuda")
MADE = re.compile(
    r"\w+_[0-9a-f]{24}\.(py|.*\.(pyc|nbi|nbc|sum|tmp))"
)  # the names that the kernel cache gives its files


@dataclass(frozen=True)
class Check:
    """One thing looked at: what it is, the verdict and what was found. A note leaves kernels running, a problem not."""

    what: str
    verdict: str
    found: str


def examine():
    """Look at everything -> list of Check, in the order of the table."""
    return [
        chosen_device(),
        gpus(),
        *versions(),
        *(conflicts() or [Check("conflicts", OK, "none that is known")]),
        kernel_cache(),
        profiler(),
        Check("cores", OK, f"{usable_cores()} of {os.cpu_count()} usable"),
        memory(),
        terminal(),
        self_test(),
    ]


def page(checks):
    """The checks as report prints them: a table, and the sum of it."""
    yield report.heading("Doctor", platform.platform(terse=True))
    yield ""
    yield report.table(["", "verdict", "found"], [[check.what, check.verdict, check.found] for check in checks])
    yield ""
    problems = [check.what for check in checks if check.verdict == PROBLEM]
    yield report.prose(f"To be put right: {', '.join(problems)}." if problems else "Kernels run on this machine.")


def figures(checks):
    """The same for --json."""
    return {
        "ok": all(check.verdict != PROBLEM for check in checks),
        "platform": platform.platform(),
        "checks": [asdict(check) for check in checks],
    }


# --- devices ----------------------------------------------------------------------------------------------------------


def chosen_device():
    try:
        chosen = device()
    except (ValueError, KernelError) as error:
        return Check("kernels run on", PROBLEM, f"nothing: {error}")
    unused = chosen.name == "sim" or (chosen.name == "cpu" and gpu_count())
    name = {"cpu": "the compiled CPU engine", "gpu": "the GPU", "sim": "Numba's simulator, slowly"}[chosen.name]
    return Check("kernels run on", NOTE if unused else OK, f"{chosen.name}, {name}: {chosen.why}")


def gpus():
    if not gpu_count():
        why = "no NVIDIA driver is installed" if gpu_count() is None else "the NVIDIA driver reports no GPU"
        return Check("GPU", OK, f"{why}; nothing here needs one")
    return Check("GPU", OK, f"{gpu_count()} seen by the driver: {gpu_names() or 'nvidia-smi does not name them'}")


def gpu_names():
    """What nvidia-smi calls the GPUs, or "" where it is not there or does not answer."""
    try:
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(f"{line} (driver)" for line in done.stdout.splitlines()) if done.returncode == 0 else ""


# --- versions and conflicts -------------------------------------------------------------------------------------------


def versions():
    yield version_check("python", platform.python_version())
    for name in PACKAGES:
        try:
            yield version_check(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            missing = (OK, "not installed; only a GPU needs it") if name == "numba-cuda" else (NOTE, "not known")
            yield Check(name, *missing)
    yield Check("numba_flash", OK, __version__)


def version_check(name, version):
    lowest = LOWEST.get(name, ())
    if tuple(int(part) for part in re.findall(r"\d+", version)[: len(lowest)]) >= lowest:
        return Check(name, OK, version)
    verdict = NOTE if name == "numba-cuda" and not gpu_count() else PROBLEM
    return Check(name, verdict, f"{version} is too old: install {'.'.join(map(str, lowest))} or later")


def conflicts():
    """The known conflicts that this machine has."""
    gpu_matters = PROBLEM if gpu_count() else NOTE
    found = []
    if numba.config.DISABLE_JIT:
        found.append((PROBLEM, "NUMBA_DISABLE_JIT is set, so that no kernel can be compiled: unset it"))
    simulator = os.environ.get("NUMBA_ENABLE_CUDASIM", "")
    if numba.config.ENABLE_CUDASIM:
        found.append((NOTE, "NUMBA_ENABLE_CUDASIM is set: kernels run on Numba's simulator, some hundred times slower"))
    elif simulator not in ("", "0"):
        found.append((NOTE, f"NUMBA_ENABLE_CUDASIM={simulator!r} is not understood: only 1 turns the simulator on"))
    if numpy_conflict():
        found.append((gpu_matters, numpy_conflict()))
    numba_cuda = importlib.util.find_spec("numba_cuda")
    if gpu_count() and not numba_cuda:
        found.append((NOTE, "the GPU needs the package numba-cuda: pip install 'numba_flash[cu13]' (or [cu12])"))
    if numba_cuda and "numba_cuda" not in Path(cuda.__file__).parts:
        found.append((gpu_matters, "numba.cuda is still numba's own, not that of numba-cuda: install numba-cuda again"))
    if os.environ.get("NUMBA_FLASH_STRICT") == "1":
        found.append((NOTE, "NUMBA_FLASH_STRICT=1 is set: races and unwritten memory are found, and all is slower"))
    return [Check("conflict", verdict, text) for verdict, text in found]


# --- the kernel cache -------------------------------------------------------------------------------------------------


def cache_files():
    """The files that the kernel cache made, and no others."""
    homes = {kernels.folder(), Path(numba.config.CACHE_DIR or kernels.folder())}
    there = (file for home in homes for file in home.rglob("*_" + "?" * 24 + ".*"))
    return sorted(file for file in there if MADE.fullmatch(file.name) and file.is_file())


def clear_cache():
    """Delete the kernel cache -> what was deleted. Raises OSError where a file cannot be."""
    files = cache_files()
    size = sum(file.stat().st_size for file in files)
    for file in files:
        file.unlink(missing_ok=True)
    return {"folder": str(kernels.folder()), "files": len(files), "bytes": size, "size": report.in_bytes(size)}


def kernel_cache():
    folder, files = kernels.folder(), cache_files()
    size = report.in_bytes(sum(file.stat().st_size for file in files))
    text = f"{folder}: {sum(file.suffix == '.py' for file in files)} kernels, {size}"
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            return Check("kernel cache", OK, f"{text}, writable")
    except OSError as error:
        advice = "each run compiles again; set NUMBA_FLASH_CACHE_DIR to a folder that can be written"
        return Check("kernel cache", NOTE, f"{text}, not writable ({error.strerror}): {advice}")


# --- the machine ------------------------------------------------------------------------------------------------------


def profiler():
    if path := find_ncu():
        return Check("profiler", OK, path)
    return Check("profiler", NOTE if gpu_count() else OK, "ncu is not on the path; only a GPU can be profiled")


def usable_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def memory():
    free = free_bytes("cpu")
    if free is None:
        return Check("memory", NOTE, "nobody can tell how much is free here")
    return Check("memory", OK if free >= 1e9 else NOTE, f"{report.in_bytes(free)} free")


def terminal():
    screen = report.console()
    if not screen.is_terminal:
        return Check("terminal", OK, f"none: plain text, {screen.width} columns, {screen.encoding}")
    size = shutil.get_terminal_size().columns
    unicode = "Unicode" if screen.encoding.startswith("utf") else f"no Unicode ({screen.encoding}): ASCII is printed"
    colour = f"colour ({screen.color_system})" if screen.color_system and not screen.no_color else "no colour"
    narrow = size < report.WIDTH
    text = f"{size} columns{f', and lessons want {report.WIDTH}' if narrow else ''}; {unicode}; {colour}"
    return Check("terminal", NOTE if narrow or not screen.encoding.startswith("utf") else OK, text)


# --- the self-test ----------------------------------------------------------------------------------------------------


@cache
def make_double():
    """A kernel that doubles every element: one load and one store each."""

    @cuda.jit
    def double(A):
        i = cuda.grid(1)
        if i < A.shape[0]:
            A[i] *= 2

    return double


def self_test(n=50):
    """Compile one small kernel, run it, and compare its result and its count with what they must be."""
    if numba.config.DISABLE_JIT:
        return Check("self-test", PROBLEM, "not run, since NUMBA_DISABLE_JIT is set")
    A = np.arange(n, dtype=np.float32)
    begin = time.perf_counter()
    try:
        with ledger() as bill:
            launch(make_double(), 2, 32, A)
        count = bill["A"]
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        return Check("self-test", PROBLEM, f"a small kernel does not run: {type(error).__name__}: {first}")
    seconds = time.perf_counter() - begin
    if not np.array_equal(A, 2 * np.arange(n)):
        return Check("self-test", PROBLEM, f"a kernel that doubles 0, 1, 2, 3 ... gave {A[:4].tolist()} ...")
    if count != Count(n, n):
        return Check("self-test", PROBLEM, f"{count.loads} loads and {count.stores} stores counted, not {n} of each")
    return Check("self-test", OK, f"a kernel ran in {seconds:.2f} s, and its {n} loads and {n} stores were counted")
