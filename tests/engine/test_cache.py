"""The disk cache: used by the next process, never stale, repaired when damaged, dispensable."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from numba_flash.engine import cache, cpu
from numba_flash.engine.rewrite import function_of, rewrite

from . import feature_kernels as kernels

SCRIPT = """
import sys, numpy as np, numba_flash as nf
from numba import cuda
@cuda.jit
def twice(A):
    i = cuda.grid(1)
    if i < A.shape[0]:
        A[i] *= FACTOR
A = np.ones(3, np.float32)
nf.launch(twice, 1, 4, A, device="cpu")
assert (A == FACTOR).all(), A
from numba_flash.engine import cpu
run = next(iter(cpu._modules.values()))["run"]
print(sum(run.stats.cache_hits.values()), sum(run.stats.cache_misses.values()), file=sys.stdout)
"""


def run(tmp_path, folder, factor=2, first="", **environment):
    script = tmp_path / "script.py"
    script.write_text(first + textwrap.dedent(SCRIPT).replace("FACTOR", str(factor)))
    environment = (
        os.environ
        | {"NUMBA_FLASH_CACHE_DIR": str(folder), "PYTHONWARNINGS": "error,ignore::DeprecationWarning"}
        | environment
    )
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def test_the_next_process_compiles_nothing(tmp_path):
    folder = tmp_path / "cache"
    assert run(tmp_path, folder) == (["0", "1"], "")
    assert run(tmp_path, folder) == (["1", "0"], "")
    assert run(tmp_path, folder, factor=3) == (["0", "1"], "")  # another source is another entry
    assert run(tmp_path, folder) == (["1", "0"], "")


@pytest.mark.parametrize(
    "damage",
    [
        "empty",
        "truncated",
        "source",
        *(pytest.param(d, marks=pytest.mark.course) for d in ("garbage", "zeros", "not text")),
    ],
)
def test_a_damaged_entry_is_rebuilt_with_one_notice(tmp_path, damage):
    folder = tmp_path / "cache"
    run(tmp_path, folder)
    suffix = {"source": "*.py", "not text": "*.py", "zeros": "*.nbc"}.get(damage, "*.nb[ic]")
    files = list(folder.rglob(suffix))
    assert files
    for file in files:
        content = file.read_bytes()
        broken = {
            "empty": b"",
            "garbage": b"\x80nothing" * 40,
            "truncated": content[: len(content) // 2],
            "source": b"1/0",
            "not text": b"\xff\xfe",
            "zeros": content[:1000] + bytes(4096) + content[5096:],  # what a power cut leaves
        }
        file.write_bytes(broken[damage])
    _, notice = run(tmp_path, folder)
    if damage not in ("source", "not text"):  # a changed source is written again without a word
        assert notice.count("\n") == 1
        assert "damaged entry of the kernel cache" in notice
    assert run(tmp_path, folder) == (["1", "0"], "")


def test_a_folder_that_cannot_be_used_costs_one_notice(tmp_path):
    file = tmp_path / "a file"
    file.write_text("in the way")
    _, notice = run(tmp_path, file)
    assert notice.count("\n") == 1
    assert str(file) in notice
    assert "NUMBA_FLASH_CACHE_DIR" in notice
    assert file.read_text() == "in the way"


@pytest.mark.skipif(sys.platform == "win32", reason="a limit of Unix")
@pytest.mark.parametrize("limit", ["0", "source"])
def test_a_full_disk_costs_one_notice(tmp_path, limit):
    """Not even the source fits, or the source and not the machine code: a limit on files stands in for the disk."""
    folder = tmp_path / "cache"
    run(tmp_path, folder)
    (source,) = folder.glob("*.py")
    limit = 0 if limit == "0" else source.stat().st_size
    assert all(limit < file.stat().st_size for file in folder.rglob("*.nbc"))
    first = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    other = tmp_path / "other"
    found, notice = run(tmp_path, other, first=first)
    assert found == ["0", "1"]
    assert notice.count("\n") == 1
    assert f"since {other} cannot be used (File too large)" in notice
    assert {file.suffix for file in other.rglob("*") if file.is_file()} <= ({".py", ".nbi"} if limit else set())
    assert run(tmp_path, other) == (["0", "1"], "")  # there is space again


def test_a_seal_that_cannot_be_written_is_none(tmp_path, monkeypatch):
    path = tmp_path / "kernel.py"
    (tmp_path / "kernel.1.nbc").write_bytes(b"code")

    def half(file, text):
        file.write_bytes(text[:5].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "write_text", half)
    cache.seal(path)
    assert [file.suffix for file in tmp_path.iterdir()] == [".nbc"]
    assert cache.is_intact(path)


def test_one_compile_serves_all_block_sizes():
    sources = {rewrite(function_of(kernels.make_reverse(T))).source for T in (4, 8, 31)}
    assert len(sources) == 1
    for T in (4, 8, 31):
        cpu.run(kernels.make_reverse(T), (1, 1, 1), (T, 1, 1), (np.zeros((1, T), np.float32),))
    assert len(cpu._modules[sources.pop()]["run"].overloads) == 1


def test_the_key_holds_constants_globals_device_functions_and_versions(monkeypatch):
    from numba import float32, float64

    from . import helper_kernels

    def key(kernel):
        return cache.stem("k", rewrite(function_of(kernel)).source)

    assert key(kernels.make_local(3, float32)) == key(kernels.make_local(5, float32))
    assert key(kernels.make_local(3, float32)) != key(kernels.make_local(3, float64))
    before = key(kernels.from_elsewhere)
    assert before == key(kernels.from_elsewhere)
    monkeypatch.setattr(helper_kernels, "SCALE", 4)
    assert key(kernels.from_elsewhere) != before
    monkeypatch.undo()
    monkeypatch.setattr(cache, "engine_version", lambda: b"another")
    assert key(kernels.from_elsewhere) != before
