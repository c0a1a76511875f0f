"""Shared by all tests: a kernel cache of their own, new for each run unless NUMBA_FLASH_CACHE_DIR names one."""

import os
import tempfile

from hypothesis import settings

from .mutants.table import pytest_terminal_summary  # noqa: F401

settings.register_profile("no deadline", deadline=None)  # a loaded machine is no failure
settings.load_profile("no deadline")

if "NUMBA_FLASH_CACHE_DIR" not in os.environ:
    # One folder for all worker processes, so that each kernel is compiled once.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    os.environ["NUMBA_FLASH_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), f"numba_flash_tests_{run}")
