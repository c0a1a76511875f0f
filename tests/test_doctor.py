"""doctor: every verdict can be reached, and the cache is cleared of its own files alone."""

import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numba
import pytest

from numba_flash import __main__ as cli
from numba_flash import doctor, report
from numba_flash.doctor import NOTE, OK, PROBLEM, Check

ROOT = Path(__file__).resolve().parent.parent
PATHS = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def found(checks, what):
    return next(check for check in checks if check.what == what)


def with_gpus(monkeypatch, number):
    monkeypatch.setattr(doctor, "gpu_count", lambda: number)


def test_this_machine(capsys, monkeypatch):
    monkeypatch.delenv("NUMBA_FLASH_DEVICE", raising=False)
    checks = doctor.examine()
    assert [check for check in checks if check.verdict == PROBLEM] == []
    assert {check.verdict for check in checks} <= {OK, NOTE}
    assert found(checks, "self-test").verdict == OK
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for what in ("kernels run on", "GPU", "numba-cuda", "numba_flash", "kernel cache", "profiler", "cores", "memory"):
        assert what in out
    assert "Kernels run on this machine." in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_json(capsys, tmp_path):
    assert cli.main(["doctor", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["ok"] is True
    assert all(set(check) == {"what", "verdict", "found"} for check in figures["checks"])
    file = tmp_path / "doctor.json"
    assert cli.main(["doctor", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["ok"] is True


def test_a_problem_is_exit_status_1(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: [Check("GPU", OK, "1"), Check("self-test", PROBLEM, "it does not")])
    assert cli.main(["doctor"]) == 1
    assert "To be put right: self-test." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "status", "says"),
    [
        ({"NUMBA_DISABLE_JIT": "1"}, 1, "NUMBA_DISABLE_JIT is set"),
        ({"NUMBA_FLASH_DEVICE": "tpu"}, 1, "NUMBA_FLASH_DEVICE='tpu' is unknown"),
        ({"NUMBA_ENABLE_CUDASIM": "1"}, 0, "NUMBA_ENABLE_CUDASIM is set"),
        ({"NUMBA_FLASH_STRICT": "1", "NUMBA_FLASH_DEVICE": "cpu"}, 0, "NUMBA_FLASH_STRICT=1 is set"),
    ],
)
def test_the_environment(environment, status, says):
    environment = {**os.environ, "PYTHONPATH": PATHS, "NUMBA_FLASH_DEVICE": "", **environment}
    args = [sys.executable, "-m", "numba_flash", "doctor"]
    done = subprocess.run(args, env=environment, capture_output=True, text=True, timeout=120, encoding="utf-8")
    assert done.returncode == status, done.stderr
    assert says in " ".join(done.stdout.split())
    assert done.stderr == ""


# --- versions and conflicts -------------------------------------------------------------------------------------------


def test_lowest_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], f"python{project['requires-python']}"]
    lines += [line.replace("[cu12]", "") for line in project["optional-dependencies"]["cu12"] if "numba-cuda" in line]
    bounds = dict(line.split(">=") for line in lines)
    assert {name: ".".join(map(str, lowest)) for name, lowest in doctor.LOWEST.items()} == bounds


@pytest.mark.parametrize(
    ("name", "version", "gpus", "verdict"),
    [
        ("numba", "0.61.0", 0, OK),
        ("numba", "0.61.0rc1", 0, OK),
        ("numba", "0.60.1", 0, PROBLEM),
        ("numpy", "1.26.4", 0, PROBLEM),
        ("numba-cuda", "0.30.4", 1, OK),
        ("numba-cuda", "0.24.0", 0, NOTE),
        ("numba-cuda", "0.24.0", 1, PROBLEM),
        ("llvmlite", "0.1", 0, OK),
    ],
)
def test_versions(monkeypatch, name, version, gpus, verdict):
    with_gpus(monkeypatch, gpus)
    check = doctor.version_check(name, version)
    assert check.verdict == verdict
    assert version in check.found


def test_packages_that_are_not_there(monkeypatch):
    def version(name):
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    checks = list(doctor.versions())
    assert found(checks, "numba-cuda") == Check("numba-cuda", OK, "not installed; only a GPU needs it")
    assert found(checks, "rich").verdict == NOTE


@pytest.mark.parametrize(("gpus", "verdict"), [(0, NOTE), (1, PROBLEM)])
def test_numpy_conflict(monkeypatch, gpus, verdict):
    with_gpus(monkeypatch, gpus)
    monkeypatch.setattr(doctor, "numpy_conflict", lambda: "pip install 'numpy<2.5'")
    assert Check("conflict", verdict, "pip install 'numpy<2.5'") in doctor.conflicts()


def test_a_gpu_without_numba_cuda_names_the_extra(monkeypatch):
    with_gpus(monkeypatch, 1)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    (check,) = (check for check in doctor.conflicts() if "numba-cuda" in check.found)
    assert check.verdict == NOTE
    assert "numba_flash[cu13]" in check.found


def test_numba_cuda_that_is_not_in_use(monkeypatch):
    with_gpus(monkeypatch, 1)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(doctor.cuda, "__file__", "/lib/numba/cuda/__init__.py")
    assert any(check.verdict == PROBLEM and "install numba-cuda again" in check.found for check in doctor.conflicts())


def test_simulator_values(monkeypatch):
    monkeypatch.setattr(numba.config, "ENABLE_CUDASIM", 0)
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "true")
    assert any("'true' is not understood" in check.found for check in doctor.conflicts())


# --- devices ----------------------------------------------------------------------------------------------------------


def test_the_gpu_is_named(monkeypatch, tmp_path):
    with_gpus(monkeypatch, 0)
    assert doctor.gpus().verdict == OK
    with_gpus(monkeypatch, 2)
    monkeypatch.setattr(doctor, "gpu_names", lambda: "NVIDIA H200, 580.1 (driver)")
    assert doctor.gpus().found == "2 seen by the driver: NVIDIA H200, 580.1 (driver)"
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.gpu_names() == ""


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")
def test_nvidia_smi_is_asked(monkeypatch, tmp_path):
    script = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for text, names in (("echo 'NVIDIA H200, 580.1'", "NVIDIA H200, 580.1 (driver)"), ("echo no; exit 9", "")):
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        assert doctor.gpu_names() == names


def test_the_profiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for gpus, verdict in ((0, OK), (1, NOTE)):
        with_gpus(monkeypatch, gpus)
        assert doctor.profiler().verdict == verdict
    name = "ncu.exe" if sys.platform == "win32" else "ncu"
    (tmp_path / name).touch(0o755)
    assert doctor.profiler().found == str(tmp_path / name)


# --- the cache --------------------------------------------------------------------------------------------------------


def test_clearing_the_cache_deletes_its_files_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path))
    stem = "scores_0123456789abcdef01234567"
    ours = [tmp_path / f"{stem}.py"]
    ours += [tmp_path / "__pycache__" / f"{stem}{end}" for end in (".run-4.py311.nbi", ".run-4.py311.1.nbc")]
    others = ("notes.py", f"{stem}.txt", "__pycache__/x.nbi", "scores_0123.py", "deep/a_0123456789abcdef0123456z.py")
    theirs = [tmp_path / name for name in others]
    for file in ours + theirs:
        file.parent.mkdir(exist_ok=True)
        file.write_text("text")
    assert set(ours) <= set(doctor.cache_files())
    assert not set(theirs) & set(doctor.cache_files())
    assert cli.main(["doctor", "--clear-cache"]) == 0
    assert "deleted: " in capsys.readouterr().out
    assert doctor.cache_files() == []
    assert all(file.exists() for file in theirs)
    assert cli.main(["doctor", "--clear-cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 0


def test_real_entries_are_recognised(tmp_path):
    script = (
        "import numpy as np\nfrom numba_flash import doctor\n"
        "assert doctor.self_test().verdict == 'ok'\n"
        "made = [f for f in doctor.kernels.folder().rglob('*') if f.is_file()]\n"
        "assert len(made) == 4 and sorted(made) == doctor.cache_files(), (made, doctor.cache_files())\n"
        "doctor.clear_cache()\n"
        "assert doctor.self_test().verdict == 'ok'\n"
    )
    environment = os.environ | {
        "PYTHONPATH": PATHS, "NUMBA_FLASH_CACHE_DIR": str(tmp_path), "NUMBA_FLASH_DEVICE": "cpu",
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path / "not" / "yet"))
    check = doctor.kernel_cache()
    assert check.verdict == OK
    assert "0 kernels, 0 B, writable" in check.found
    assert not (tmp_path / "not").exists()
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(file))
    check = doctor.kernel_cache()
    assert check.verdict == NOTE
    assert "not writable" in check.found


# --- the machine and the self-test ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "verdict"), [(None, NOTE), (10**8, NOTE), (10**10, OK)])
def test_memory(monkeypatch, free, verdict):
    monkeypatch.setattr(doctor, "free_bytes", lambda device: free)
    assert doctor.memory().verdict == verdict


@pytest.mark.parametrize(
    ("encoding", "columns", "verdict", "says"),
    [
        ("utf-8", 80, OK, "80 columns; Unicode; colour (256)"),
        ("utf-8", 60, NOTE, "60 columns, and lessons want 80; Unicode"),
        ("ascii", 100, NOTE, "100 columns; no Unicode (ascii)"),
    ],
)
def test_terminals(monkeypatch, encoding, columns, verdict, says):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    Terminal.encoding = encoding
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", Terminal())
    check = doctor.terminal()
    assert check.verdict == verdict
    assert says in check.found
    monkeypatch.setenv("NO_COLOR", "1")
    assert "no colour" in doctor.terminal().found
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert doctor.terminal().verdict == OK


def test_the_self_test_notices(monkeypatch):
    def raises(*args):
        raise RuntimeError("no such luck\nand more")

    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")
    launch = doctor.launch
    for fault, says in (
        (lambda *args: None, "KeyError"),
        (raises, "RuntimeError: no such luck"),
        (lambda *args: (launch(*args), launch(*args)), "gave [0.0, 4.0"),
    ):
        monkeypatch.setattr(doctor, "launch", fault)
        check = doctor.self_test()
        assert check.verdict == PROBLEM
        assert says in check.found
    monkeypatch.setattr(doctor, "launch", launch)
    monkeypatch.setattr(doctor, "Count", lambda loads, stores: (loads, stores + 1))
    assert "50 loads and 50 stores counted" in doctor.self_test().found
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert doctor.self_test().found == "not run, since NUMBA_DISABLE_JIT is set"


def test_a_long_finding_wraps():
    text = report.to_text(list(doctor.page([Check("GPU", OK, "long " * 40)]))[2])
    assert max(map(len, text.splitlines())) <= 80
