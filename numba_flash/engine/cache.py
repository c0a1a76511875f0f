"""The disk cache of compiled kernels: one source file a kernel, and beside it what Numba compiled from it.

The file's name holds a hash of everything the machine code depends on, so nothing in it ever goes stale. The folder is
`NUMBA_FLASH_CACHE_DIR`, or `numba_flash` in the user's cache folder. It may be deleted at any time.
"""

import hashlib
import importlib.util
import os
import sys
import tempfile
from functools import cache
from pathlib import Path

import llvmlite
import numba
import numpy as np

from . import access, runtime

_noticed = set()


def folder():
    """Where compiled kernels are kept; the folder need not exist."""
    if chosen := os.environ.get("NUMBA_FLASH_CACHE_DIR"):
        return Path(chosen)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library/Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "numba_flash"


@cache
def engine_version():
    """What compiled code depends on beside its own source."""
    sources = [Path(module.__file__).read_bytes() for module in (access, runtime)]
    versions = (sys.version, numba.__version__, llvmlite.__version__, np.__version__)
    return b"".join(sources) + repr(versions).encode()


def stem(name, source):
    digest = hashlib.sha256(engine_version() + source.encode()).hexdigest()[:24]
    return f"{name}_{digest}"


def notice(message):
    """Say it once a process, on stderr."""
    if message not in _noticed:
        _noticed.add(message)
        print(f"numba_flash: {message}", file=sys.stderr)


def write(name, source):
    """The path of the file that holds `source`, written if need be, or None when the folder cannot be used."""
    path = folder() / f"{stem(name, source)}.py"
    try:
        if path.exists() and path.read_text(encoding="utf-8") == source:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            file.write(source)
        os.replace(file.name, path)
        return path
    except OSError as error:
        notice(f"compiled kernels are not kept, since {folder()} cannot be used ({error.strerror}); "
               "set NUMBA_FLASH_CACHE_DIR to a folder that can")  # fmt: skip
        return None


def module_from(name, source, path):
    """The namespace of the rewritten kernel's module, from its cache file or from the text alone."""
    if path is None:
        namespace = {"__name__": name}
        exec(compile(source, f"<{name} on the CPU>", "exec"), namespace)
        return namespace
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # Numba's cache imports it by name
    spec.loader.exec_module(module)
    module.run.enable_caching()
    return vars(module)


def entry(path):
    """The files of one kernel: its source and what Numba made of it."""
    homes = {path.parent, Path(numba.config.CACHE_DIR or path.parent)}
    return [file for home in homes for file in home.glob(f"**/{path.stem}*")]


def holds(path):
    """Whether machine code for the kernel is there."""
    return any(file.suffix in (".nbi", ".nbc") for file in entry(path))


def forget(path):
    """Delete one kernel's entry, after it turned out to be damaged."""
    for file in entry(path):
        file.unlink(missing_ok=True)
    notice(f"a damaged entry of the kernel cache was deleted and is built again ({path.stem})")
