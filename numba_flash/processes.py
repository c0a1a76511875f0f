"""Ends a process, and what it started."""

import contextlib
import os
import signal
import subprocess
import sys

WINDOWS = sys.platform == "win32"


def end(process):
    """End the process and what it started, but for what has put itself into a session of its own."""
    if WINDOWS:
        if process.poll() is None:
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False)
            process.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
