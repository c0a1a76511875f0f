"""The disk cache of compiled kernels: one source file a kernel, and beside it what Numba compiled from it.

The file's name holds a hash of everything the machine code depends on, so nothing in it ever goes stale. The folder is
`NUMBA_FLASH_CACHE_DIR`, or `numba_flash` in the user's cache folder. It may be deleted at any time.
"""

import contextlib
import hashlib
import importlib.util
import os
import pickle
import sys
import tempfile
import time
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
        return Path(chosen).expanduser()
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "numba_flash"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData/Local"))
    elif sys.platform == "darwin":
        base = home / "Library/Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
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
        if path.exists() and path.read_bytes() == source.encode():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_bytes(source.encode())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path
    except OSError as error:
        not_kept(error.strerror)
        return None


def not_kept(why):
    notice(f"compiled kernels are not kept, since {folder()} cannot be used ({why}); "
           "set NUMBA_FLASH_CACHE_DIR to a folder that can")  # fmt: skip


def module_from(name, source, path):
    """The namespace of the rewritten kernel's module, from its cache file or from the text alone."""
    if path is None:
        namespace = {"__name__": name}
        exec(compile(source, f"<{name} on the CPU>", "exec"), namespace)
        return namespace
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # Numba's cache imports it by name
    spec.loader.exec_module(module)
    try:
        module.run.enable_caching()
    except RuntimeError:  # a folder that holds the source but cannot be written
        not_kept("not writable")
        return vars(module)
    save = module.run._cache.save_overload

    def save_if_possible(*what):
        try:
            save(*what)
        except OSError as error:  # the disk is full
            not_kept(error.strerror)

    module.run._cache.save_overload = save_if_possible
    return vars(module)


def entry(path):
    """The files of one kernel: its source and what Numba made of it."""
    homes = {path.parent, Path(numba.config.CACHE_DIR or path.parent)}
    return [file for home in homes for file in home.glob(f"**/{path.stem}*")]


# What reading a damaged entry raises: bad pickles, missing names, machine code that LLVM does not accept.
DAMAGE = (
    pickle.PickleError,
    EOFError,
    ImportError,
    AttributeError,
    LookupError,
    ValueError,
    TypeError,
    RuntimeError,
    OSError,
)


def seal(path):
    """Note what the machine code of an entry hashes to, for `is_intact`."""
    for file in entry(path):
        if file.suffix == ".nbc":
            made = file.with_suffix(".sum")
            try:
                made.write_text(hashlib.sha256(file.read_bytes()).hexdigest())
            except OSError:
                with contextlib.suppress(OSError):
                    made.unlink()


def is_intact(path):
    """Whether the machine code of an entry is what was written; broken machine code would crash the process."""
    for file in entry(path):
        seal = file.with_suffix(".sum")
        for attempt in range(2):
            try:
                if file.suffix != ".nbc" or seal.read_text() == hashlib.sha256(file.read_bytes()).hexdigest():
                    break
            except (OSError, ValueError):
                break  # another process is at it
            time.sleep(0.2 * (1 - attempt))
        else:
            return False
    return True


def holds(path):
    """Whether machine code for the kernel is there."""
    return any(file.suffix in (".nbi", ".nbc") for file in entry(path))


def forget(path):
    """Delete one kernel's entry, after it turned out to be damaged."""
    for file in entry(path):
        with contextlib.suppress(OSError):
            file.unlink()
    notice(f"a damaged entry of the kernel cache was deleted and is built again ({path.stem})")
