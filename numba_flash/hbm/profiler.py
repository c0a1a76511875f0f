"""The bill's third column: the bytes that L1, L2 and DRAM moved, as Nsight Compute (`ncu`) measured them on a GPU.

`measure` runs the pass once more under ncu, in a process of its own: `python -m numba_flash.hbm.profiler`, this module.
"""

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from .. import report
from ..engine.launch import device
from ..errors import KernelError
from ..processes import WINDOWS, end

METRICS = {
    "l1_loads": "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",
    "l1_stores": "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum",
    "l2": "lts__t_bytes.sum",
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
}
OPTIONS = ("--csv", "--print-units", "base", "--clock-control", "none", "--target-processes", "all")
HEADER = '"ID",'  # how the first line of the CSV begins
SECONDS = 600  # that ncu may take
NOT_PASSED = ("command", "run", "json", "device", "measure", "predict_only")  # flags that do not change the pass


def find_ncu():
    """The path of ncu, or None."""
    return shutil.which("ncu")


def refuse(*, predict_only=False, on=None, predicted=None):
    """ValueError where it is plain before the run that nothing can be measured.

    on: the device that was asked for. predicted: the Bill of the run, where it may be empty.
    """
    if predict_only:
        raise ValueError("--measure runs the stage, and --predict-only runs nothing: leave one of them out")
    if on not in (None, "gpu"):
        raise ValueError(f"--measure needs a GPU: leave it out, or --device {on}")
    try:
        place = device(on)
    except KernelError as error:
        raise ValueError(f"--measure needs a GPU: {error}") from None
    if place.name != "gpu":
        raise ValueError(f"--measure needs a GPU, and kernels run on {place}: leave it out")
    if not find_ncu():
        raise ValueError(
            "--measure needs Nsight Compute, and ncu is not on the PATH: install it (the CUDA toolkit has it), or add "
            "its folder to PATH"
        )
    if predicted is not None and not predicted.elements:
        raise ValueError("--measure has nothing to measure, since no kernel is launched at these sizes")


def measure(flags, launches):
    """Run the pass of `bill`'s flags under ncu -> {kernel: {"launches": …, a key of METRICS: bytes, …}}.

    `launches` names the kernels of the pass in their order, as the ledger has them: what ncu saw before, such as the
    forward pass that a backward pass starts from, is left out. KernelError says why nothing was measured.
    """
    ncu = find_ncu()
    child = [sys.executable, "-m", "numba_flash.hbm.profiler", *to_arguments(flags)]
    with report.progress("measuring with ncu"):
        status, output = run([ncu, *OPTIONS, "--metrics", ",".join(METRICS.values()), *child])
    if problem := failure(status, output):
        raise KernelError(f"nothing was measured: {problem}")
    try:
        profiled = parse(output)
    except (ValueError, csv.Error) as error:
        raise KernelError(
            f"nothing was measured: the output of ncu cannot be read ({error}): another version of Nsight Compute may "
            "write what is expected here"
        ) from None
    if not profiled:
        raise KernelError(
            f"nothing was measured: ncu profiled no kernel{told(output)}; another version of Nsight Compute may know "
            "this GPU and its driver"
        )
    profiled = profiled[max(0, len(profiled) - len(launches)) :]
    names = [kernel for kernel, _ in profiled]
    if names != list(launches):
        raise KernelError(
            f"nothing was measured: ncu profiled {', '.join(names)}, and the pass launches {', '.join(launches)}"
        )
    measured = {}
    for kernel, values in profiled:
        sums = measured.setdefault(kernel, dict.fromkeys(("launches", *METRICS), 0))
        for name, value in {"launches": 1, **values}.items():
            sums[name] += value
    return measured


# --- ncu --------------------------------------------------------------------------------------------------------------


def run(command):
    """Run ncu for SECONDS at most -> (its exit status, None where it was stopped, and all that was printed)."""
    paths = filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"NUMBA_FLASH_DEVICE": "gpu", "PYTHONPATH": os.pathsep.join(paths)}
    apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if WINDOWS else {"start_new_session": True}
    with tempfile.TemporaryFile() as printed:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": subprocess.STDOUT}
        try:
            process = subprocess.Popen(command, env=environment, **pipes, **apart)
        except OSError as error:
            raise KernelError(f"nothing was measured: {command[0]} cannot be started ({error.strerror})") from None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)
        finally:
            status = process.poll()
            if status is None:
                end_descendants(process.pid)
            end(process)
        printed.seek(0)
        return status, printed.read().decode("utf-8", "replace")


def end_descendants(pid):
    """On Linux, end what a process has started, in whatever process group or session that is."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
    below = {pid}
    while more := {one for one, parent in parents.items() if parent in below} - below:
        below |= more
    for one in below - {pid}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def failure(status, output):
    """Why ncu measured nothing, and what to do, or None where it seems to have."""
    if status is None:
        return f"ncu had not ended after {SECONDS:g} s and was stopped; a smaller --n takes less"
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0, as https://developer.nvidia.com/ERR_NVGPUCTRPERM explains"
        )
    if unknown := re.search(r"Failed to find metric (\S+)", output):
        return f"this ncu has no metric {unknown[1]} for this GPU: a newer Nsight Compute may have it"
    if status < 0 and not WINDOWS:
        return f"ncu was ended by signal {-status} ({signal.strsignal(-status)}); run it again"
    if status:
        return f"ncu ended with exit status {status}{told(output)}"
    return None


def told(output):
    """What the program, or else ncu, says is wrong, or else the last line printed: in brackets, or nothing."""
    lines = ["".join(filter(str.isprintable, line)).strip() for line in output.splitlines()]
    lines = [line for line in lines if line and not line.startswith(('"', "==PROF=="))]
    for start in ("error: ", "==ERROR== "):
        if found := [line.removeprefix(start) for line in lines if line.startswith(start)]:
            return f" ({found[0]:.300})"
    return f" ({lines[-1]:.300})" if lines else ""


def parse(output):
    """What ncu --csv printed -> a list of (kernel, {a key of METRICS: bytes}), one for each launch, in their order.

    ValueError says what is not as it should be.
    """
    lines = output.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith(HEADER)), None)
    if first is None:
        if "No kernels were profiled" in output:
            return []
        raise ValueError(f"it has no table{told(output)}")
    columns = "ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"
    launches = {}
    for row in csv.DictReader(line for line in lines[first:] if line.startswith('"')):
        if absent := [column for column in columns if row.get(column) is None]:
            raise ValueError(f"its table has a row without {absent[0]!r}")
        number, name, metric, unit, value = (row[column] for column in columns)
        if metric not in METRICS.values():
            continue
        kernel = kernel_name(name)
        for what, text in (("ID", number), (metric, value)):
            if not re.fullmatch("[0-9][0-9,]*", text):
                raise ValueError(f"{what} of {kernel} is {text!r}, no whole number")
        number, value = (int(text.replace(",", "")) for text in (number, value))
        if unit != "byte":
            raise ValueError(f"{metric} of {kernel} is in {unit!r}, not in bytes")
        same, values = launches.setdefault(number, (kernel, {}))
        if same != kernel or metric in values:
            raise ValueError(f"ID {number} is of two launches")
        values[metric] = value
    ordered = [launches[number] for number in sorted(launches)]
    for kernel, values in ordered:
        if missing := [metric for metric in METRICS.values() if metric not in values]:
            raise ValueError(f"{missing[0]} of {kernel} is missing")
    return [(kernel, {name: values[metric] for name, metric in METRICS.items()}) for kernel, values in ordered]


def kernel_name(text):
    """`scores` of `tiled::scores[abi:v2,…](Array<float, 3, C>, …)`."""
    return re.split(r"[\[(]", text, maxsplit=1)[0].rpartition("::")[2]


# --- the process under ncu --------------------------------------------------------------------------------------------


def to_arguments(flags):
    """The flags of `bill` that the pass depends on, as name=value."""
    values = {name: value for name, value in vars(flags).items() if name not in NOT_PASSED}
    return [f"{k}={v if isinstance(v, str) else json.dumps(v, separators=(',', ':'))}" for k, v in values.items()]


def from_arguments(arguments):
    """The flags that `to_arguments` wrote."""
    flags = {}
    for name, _, text in (argument.partition("=") for argument in arguments):
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        flags[name] = tuple(value) if isinstance(value, list) else value
    return Namespace(**flags)


def main(arguments):
    """Make `bill`'s random input and run the pass once, uncounted, where NUMBA_FLASH_DEVICE says -> exit status."""
    from ..__main__ import prepare

    try:
        prepare(from_arguments(arguments), None)[1]()
    except Exception as error:  # whatever it is, the process above says it
        kind = "" if isinstance(error, ValueError | KernelError) else f"{type(error).__name__}: "
        print(f"error: {kind}{' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
