"""Writes what a command was asked to write, whole or not at all."""

import os
import shutil
from pathlib import Path


def write_text(path, text):
    """Write a text in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path, data):
    """Write a file beside its place, then put it there. OSError, in a sentence, where that cannot be done."""
    try:
        file = Path(path).resolve()
        if file.exists() and not file.is_file():  # a pipe, a device
            file.write_bytes(data)
            return
        beside = file.with_name(f".numba_flash.{os.getpid()}")
        try:
            beside.write_bytes(data)
            if file.exists():
                shutil.copymode(file, beside)
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"{str(path)!r} cannot be written ({error.strerror or error}): name another file") from None
