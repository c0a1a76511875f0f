"""Runs a student's file in a process of its own, which ends when it must, whatever the file does.

It is ended by force, and what it started with it, unless that is in a session of its own: compiled code does not
listen to a time limit of its own process.
Output is read all the time, so that a full pipe stops nobody, and kept up to a limit. This guards against slips, not
against malice: an answer runs with the rights of the one who checks it.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numba_flash

from ..processes import WINDOWS, end

OUTPUT = 4_000  # characters of what an answer prints that are kept
MEMORY = 3 * 2**30  # bytes


def run(exercise, path, seconds):
    """Judge a file -> the verdict of `judge`, and "printed", "printed_bytes" and "seconds".

    Without a verdict, since the process was stopped or ended by itself, "message" says what happened.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="numba_flash_", ignore_cleanup_errors=True) as folder:
        result = Path(folder) / "result"
        limits = str(MEMORY), str(math.ceil(2 * seconds) + 10)
        command = "numba_flash.course.judge", exercise.name, str(path), str(result), *limits
        ended = run_apart(command, seconds, folder, {"NUMBA_FLASH_STRICT": "1"})
        verdict, last = read(result)
    if verdict is None:
        verdict = {"passed": False, "message": failure(ended, last, seconds), "criteria": {}}
    return clean(verdict) | {
        "printed": ended.printed, "printed_bytes": ended.size, "seconds": round(time.monotonic() - start, 2)
    }  # fmt: skip


def clean(value):
    """A verdict without the control characters, and what is no text, that a file may have put into it."""
    if isinstance(value, dict):
        return {key: clean(part) for key, part in value.items()}
    if isinstance(value, list):
        return [clean(part) for part in value]
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in value)
    return value


class Ended(NamedTuple):
    """How a process ended: its exit status, whether it was stopped, the beginning of what it printed, and the bytes."""

    status: int
    timed_out: bool
    printed: str
    size: int


def run_apart(command, seconds, folder, more):
    """`python -m` this command in `folder`, for so many seconds at most, with `more` in its environment -> Ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment() | more,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **({"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if WINDOWS else {"start_new_session": True}),
    )
    output = Output(process.stdout)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    finally:
        timed_out = process.poll() is None
        end(process)
        output.close()
    return Ended(process.returncode, timed_out, output.text(), output.size)


def environment():
    """That of the process: the CPU engine, this numba_flash, and few threads."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_ENABLE", "NUMBA_DISABLE", "PYTEST"))}
    root = str(Path(numba_flash.__file__).resolve().parent.parent)
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONIOENCODING": "utf-8:replace",
        "PYTHONUNBUFFERED": "1",
        "NUMBA_FLASH_DEVICE": "cpu",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


class Output:
    """Reads a pipe to its end in a thread; keeps the beginning."""

    def __init__(self, pipe):
        self.pipe, self.size, self.kept = pipe, 0, b""
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        with self.pipe, contextlib.suppress(OSError):
            while part := os.read(self.pipe.fileno(), 65536):
                self.size += len(part)
                self.kept += part[: OUTPUT - len(self.kept)]

    def close(self):
        self.thread.join(1)  # a process that escaped may hold the pipe open: then the thread is left to itself

    def text(self):
        return self.kept.decode("utf-8", "replace")


def read(result):
    """(the verdict or None, the last event) of what the judge wrote."""
    last = {}
    with contextlib.suppress(OSError, ValueError):
        for line in result.read_text(encoding="utf-8").splitlines():
            last = json.loads(line)
    return last.get("verdict"), last


def failure(ended, last, seconds):
    """Why there is no verdict."""
    doing = {"import": "while your file was imported", "run": f"in the launch for {last.get('input')}"}
    during = doing.get(last.get("at"), "before your file was read")
    status = ended.status
    if ended.timed_out:
        return (
            f"It was stopped after {seconds:g} s, {during}. Likely: a loop that never ends. Does what its `while` "
            "asks for ever become false? (--seconds gives it more time.)"
        )
    if status < 0 and not WINDOWS:
        name = signal.Signals(-status).name
        why = {"SIGKILL": ": too much memory?", "SIGSEGV": ": memory that is not its own, or a recursion without end."}
        return f"Python itself was ended by the signal {name} {during}{why.get(name, '.')}"
    return (
        f"Python ended {during}, with exit status {status}, before there was a verdict. Likely: your file "
        "calls os._exit, or closes or deletes files that are not its own. Take that out."
    )
