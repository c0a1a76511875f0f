"""`python -m numba_flash`: lessons, bill, figures, doctor, bench, listing, play, check, lab and exam."""

import argparse
import ast
import json
import math
import os
import re
import runpy
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np

from . import (
    __version__,
    attention,
    attention_backward,
    bench,
    device,
    doctor,
    flops,
    ledger,
    lesson,
    listing,
    output,
    player,
    predict,
    reference,
    report,
)
from . import testing as exactness
from .blocks import SIDES, check_blocks, fitting_blocks, from_sides
from .choice import check_device
from .course import check, exam, lab
from .dtypes import DTYPES, HALVES, lse_dtype, name_of, rounded, widened
from .engine.launch import DEVICES, refuse_if_too_large
from .engine.model import GRID_YZ
from .errors import KernelError
from .figures import command as paper
from .hbm import profiler
from .hbm.predict import DIRECTIONS, algorithm0, kept
from .stages import STAGES

PROGRAM = "python -m numba_flash"
SCORES_AT_ONCE = 2**22  # of the reference, in float64


def main(argv=None):
    """Run one command -> its exit status: 0, 1 where it found something wrong, 2 for a value that will not do."""
    parser = make_parser()
    flags = parser.parse_args(argv)
    if not flags.command:
        parser.print_help()
        return 2
    try:
        return flags.run(flags)
    except BrokenPipeError:
        raise
    except (ValueError, KernelError, MemoryError, OSError) as error:
        report.console(sys.stderr).print(f"{PROGRAM} {flags.command}: error: {error}", soft_wrap=True)
        return 2 if isinstance(error, ValueError) else 1


def make_parser():
    parser = argparse.ArgumentParser(prog=PROGRAM, description="FlashAttention in plain Numba CUDA kernels.")
    parser.add_argument("--version", action="version", version=f"numba_flash {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    number = lesson.whole_number

    def command(name, run, what):
        sub = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        sub.set_defaults(run=run)
        return sub

    sub = command("lessons", lessons, "list the lessons, or run one")
    sub.add_argument("lesson", nargs="?", help="number or name: 02, 2, naive, 02_naive")
    sub.add_argument("flags", nargs=argparse.REMAINDER, help="passed on to the lesson, which lists them for --help")

    sub = command("bill", bill, "predict and count what a stage moves to and from HBM")
    sub.add_argument(
        "--stage",
        choices=STAGES,
        metavar="STAGE",
        default="flash2",
        help=f"{', '.join(STAGES)} (default: %(default)s)",
    )
    for flag, least, value, meaning in (
        ("n", 0, 1024, "N, the number of queries (default: %(default)s)"),
        ("d", 1, 64, "d, the number of columns of a head (default: %(default)s)"),
        ("n-k", 0, None, "N_k, the number of keys (default: N)"),
        ("heads", 1, 1, "number of heads of Q (default: %(default)s)"),
        ("kv-heads", 1, None, "number of heads of K and V, a divisor of --heads (default: the same)"),
        ("batch", 1, 1, "size of the batch (default: %(default)s)"),
        ("seed", 0, 0, "seed of the random input (default: %(default)s)"),
    ):
        sub.add_argument(f"--{flag}", type=number(least, None), default=value, metavar=flag[0].upper(), help=meaning)
    sub.add_argument("--blocks", type=number(1, None), nargs="+", metavar="B", help=f"{SIDES} (default: what fits)")
    sub.add_argument("--dtype", choices=DTYPES, help="default: float32, or float16 where the stage is for halves")
    what = "the pass that is billed: forward, backward (from out and lse), or both (default: %(default)s)"
    sub.add_argument("--direction", choices=DIRECTIONS, metavar="PASS", default="forward", help=what)
    sub.add_argument("--return-lse", action="store_true", help="forward: form L, the logarithm of each row's sum, too")
    sub.add_argument("--causal", action="store_true", help="query i sees key j where j <= i + N_k - N")
    what = "drop weights with probability P, from 0 to below 1 (default: %(default)s)"
    sub.add_argument("--dropout", type=float, default=0.0, metavar="P", help=what)
    what = "forward: flash2 with S blocks that share the keys of each query, for decoding"
    sub.add_argument("--split-kv", type=number(1, GRID_YZ), metavar="S", help=what)
    sub.add_argument("--atomics", action="store_true", help="backward: flash2's variant that adds dQ by atomics")
    sub.add_argument("--device", choices=DEVICES, help="where kernels run (default: what doctor says)")
    sub.add_argument("--predict-only", action="store_true", help="run nothing: any size, 10^6 queries too")
    what = "on a GPU with Nsight Compute (ncu): add the bytes that L1, L2 and DRAM moved"
    sub.add_argument("--measure", action="store_true", help=what)
    output.add_json(sub)

    paper.add_command(command)

    sub = command("doctor", examine, "look at this machine: what kernels run on, and what is in their way")
    sub.add_argument("--clear-cache", action="store_true", help="delete the compiled kernels instead")
    output.add_json(sub)

    for module in (bench, listing, player, check, lab, exam):
        module.add_command(command)
    return parser


# --- lessons ----------------------------------------------------------------------------------------------------------


def lessons(flags):
    files = lesson_files()
    if not flags.lesson:
        rows = [[file.stem[:2], title(file)] for file in files]
        how = f"Run one by its number or its name; add --help for its flags:\n   {PROGRAM} lessons 02 --n 256"
        output.show([report.table(["lesson", "title"], rows), "", report.prose(how)])
        return 0
    return run_lesson(chosen(flags.lesson, files), flags.flags)


def lesson_files():
    """The lessons in their order: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "lessons", package.parent / "lessons"):
        if files := sorted(folder.glob("[0-9][0-9]_*.py")):
            return files
    raise FileNotFoundError(f"no lessons in {package / 'lessons'} or beside the package: install numba_flash again")


def title(file):
    """The first sentence of a lesson's docstring, without the number of the lesson."""
    try:
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    except (OSError, SyntaxError, ValueError) as error:
        return f"{file.name} cannot be read: {error}"
    first = re.sub(r"^Lesson \d+\W*", "", text.partition("\n")[0]).partition(". ")[0]
    return first.rstrip(".") or file.stem[3:].replace("_", " ")


def chosen(name, files):
    """The lesson called `name`: its number, its name or both. ValueError with the list of them where there is none."""
    wanted = name.lower().removesuffix(".py")
    for file in files:
        number, _, word = file.stem.partition("_")
        if wanted in (word.lower(), file.stem.lower()) or (wanted.isdecimal() and int(wanted) == int(number)):
            return file
    raise ValueError(f"lesson {name!r} is unknown: the lessons are {', '.join(file.stem for file in files)}")


def run_lesson(file, flags):
    """Run a lesson as `python FILE flags` would -> its exit status."""
    sys.argv = [str(file), *flags]
    try:
        runpy.run_path(str(file), run_name="__main__")
    except Exception as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != str(file):  # what stands above the lesson is no news
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace)
        return 1
    return 0


# --- bill -------------------------------------------------------------------------------------------------------------


def with_dtype(flags):
    """The flags of `bill`, with the dtype that the stage takes where none is given."""
    flags.dtype = flags.dtype or ("float32" if "float32" in STAGES[flags.stage].dtypes else "float16")
    return flags


def bill(flags):
    flags = with_dtype(flags)
    if flags.blocks:
        flags.blocks = from_sides(flags.stage, flags.blocks)
    sizes = {name: getattr(flags, name) for name in ("n", "d", "n_k", "heads", "batch", "dtype")}
    more = {name: getattr(flags, name) for name in ("direction", "blocks", "return_lse", "causal")}
    more |= {"deterministic": not flags.atomics, "dropout_p": flags.dropout, "split_kv": flags.split_kv}
    if flags.atomics and (flags.stage != "flash2" or flags.direction == "forward"):
        raise ValueError("--atomics is for the backward pass of flash2: add --stage flash2 --direction both")
    if flags.split_kv and flags.direction != "forward":
        raise ValueError("--split-kv is for --direction forward")
    if flags.return_lse and flags.direction != "forward":
        raise ValueError("--return-lse is for --direction forward")
    sizes["kv_heads"] = flags.kv_heads
    predicted = predict(flags.stage, **sizes, **more)
    if flags.measure:
        profiler.refuse(predict_only=flags.predict_only, on=flags.device, predicted=predicted)
    operations = flops(flags.stage, **sizes, **more)
    ideal = algorithm0(**sizes, direction=flags.direction)
    figures = {"stage": flags.stage, **sizes, **more, "flops": operations, "predicted": json.loads(predicted.to_json())}
    figures |= {"algorithm0": json.loads(ideal.to_json())}
    counted, below, good, measured, unmeasured = None, None, True, None, None
    if not flags.predict_only:
        part = tiled_pass(flags)
        fitting_blocks(flags.stage, flags.blocks, d=flags.d, dtype=flags.dtype, direction=part)
        check_device(STAGES[flags.stage], device(flags.device))
        place = device(flags.device).name
        refuse_scores(flags, place)
        if place != "gpu":
            refuse_work(flags, operations, sizes | more)
        counted, results, inputs = count(flags, place)
        if flags.direction == "forward":
            error, naive, limit = errors(flags, results, *inputs, place)
            below, right = report.error_line(error, naive=naive, bound=limit), error <= limit
            figures |= {"error": error, "naive_error": naive, "bound": limit}
        else:
            found = gradient_errors(flags, results, *inputs, place)
            below, right = report.gradient_error_lines(found), all(error <= limit for error, _, limit in found.values())
            kinds = "error", "naive_error", "bound"
            figures["errors"] = {name: dict(zip(kinds, three, strict=True)) for name, three in found.items()}
        good = counted == predicted and right
        figures |= {"device": place, "seed": flags.seed, "counted": json.loads(counted.to_json())}
        figures |= {"equal": counted == predicted, "diff": counted.diff(predicted)}
        if flags.measure:
            try:
                measured = profiler.measure(flags, [launch.kernel for launch in counted.launches])
            except KernelError as error:
                unmeasured = error
            figures["measured"] = measured
    page = [report.heading(f"Stage {flags.stage}", facts(flags)), ""]
    name = {"forward": "Algorithm 0", "backward": "Algorithm 3", "both": "Algorithms 0, 3"}[flags.direction]
    page += [report.bill_table(counted, predicted=predicted, algorithm0=ideal, ideal=name, below=below), ""]
    if measured:
        page += [report.measured_table(measured, predicted=predicted), ""]
    a_byte = operations / predicted.total_bytes if predicted.total_bytes else 0
    page += [report.table(["floating-point operations", "FLOP per byte of HBM"], [[operations, a_byte]])]
    output.show(page, figures, flags.json)
    if unmeasured:
        raise unmeasured
    return 0 if good else 1


def tiled_pass(flags):
    """The pass whose tiles --blocks gives, as `blocks` names them."""
    if flags.split_kv:
        return "split"
    return "forward" if flags.direction == "forward" else "atomic" if flags.atomics else "backward"


def facts(flags):
    keys = f", N_k = {flags.n_k:,}" if flags.n_k not in (None, flags.n) else ""
    batch = f"batch {flags.batch}, " if flags.batch > 1 else ""
    heads = f"{flags.heads} head" + "s" * (flags.heads > 1)
    shared = f" on {flags.kv_heads}" if flags.kv_heads not in (None, flags.heads) else ""
    tiles = check_blocks(flags.stage, flags.blocks, d=flags.d, dtype=flags.dtype, direction=tiled_pass(flags))
    tile = "" if tiles is None else f", T = {tiles.Br}" if tiles.square else f", Br = {tiles.Br}, Bc = {tiles.Bc}"
    passes = {"forward": "", "backward": ", backward", "both": ", both passes"}[flags.direction]
    more = ", causal" * flags.causal + f", dropout {flags.dropout:g}" * (flags.dropout > 0)
    more += f", {flags.split_kv} splits" if flags.split_kv else ""
    return f"N = {flags.n:,}{keys}, d = {flags.d}, {flags.dtype}, {batch}{heads}{shared}{tile}{more}{passes}"


def refuse_scores(flags, place):
    """OutOfMemory where the matrices of a stage that stores them cannot be held, before the input is made."""
    keys = flags.n if flags.n_k is None else flags.n_k
    if not STAGES[flags.stage].fused:
        size = flags.batch * flags.heads * flags.n * keys * np.dtype(flags.dtype).itemsize
        refuse_if_too_large(size, f"S of {flags.n:,} × {keys:,}", place)


def refuse_work(flags, operations, how):
    """ValueError where the run, and what it is compared with, would take minutes on a CPU."""
    how = how | {"blocks": None, "split_kv": None, "deterministic": True}
    compared = flops("naive", **how) * (2 if flags.dtype == "float32" and flags.stage != "naive" else 1)
    listing.refuse_long(operations + compared, flags.n, ", or --predict-only, which runs nothing")


def count(flags, place):
    """Run the stage in a ledger on random input -> (Bill, out or gradients, what it was given)."""
    given, run = prepare(flags, place)
    with ledger() as counted:
        results = run()
    return counted, results[0] if flags.return_lse else results, given


def prepare(flags, place):
    """Random input -> (the input, a function that runs the pass which is billed)."""
    keys = flags.n if flags.n_k is None else flags.n_k
    shapes = [(flags.batch, flags.heads, flags.n, flags.d), (flags.batch, flags.kv_heads or flags.heads, keys, flags.d)]
    q, k, v = exactness.inputs(*shapes, dtype=flags.dtype, seed=flags.seed)
    scale = float(lse_dtype(flags.dtype).type(1 / math.sqrt(flags.d)))
    how = {"stage": flags.stage, "scale": scale, "device": place, **masks(flags)}
    if flags.direction == "forward":
        more = {"blocks": flags.blocks, "return_lse": flags.return_lse, "split_kv": flags.split_kv}
        return (q, k, v, scale), partial(attention, q, k, v, **more, **how)
    dout = rounded(np.random.default_rng(flags.seed + 1).standard_normal(q.shape, lse_dtype(flags.dtype)), q.dtype)
    out, lse = attention(q, k, v, return_lse=True, **how) if flags.direction == "backward" else (None, None)
    more = {"out": out, "lse": lse, "blocks": flags.blocks, "deterministic": not flags.atomics}
    return (q, k, v, dout, scale), partial(attention_backward, q, k, v, dout, **more, **how)


def masks(flags):
    """What the flags hide and drop, as keywords."""
    return {"causal": flags.causal, "dropout_p": flags.dropout, "seed": flags.seed}


def gradient_errors(flags, ours, q, k, v, dout, scale, place):
    """{"dq": (max|error| against float64, that of naive in float32 or None, the bound), …}: a head of k at a time."""
    single, is_half = q.dtype == np.float32, name_of(q.dtype) in HALVES
    naive = ours if single else None
    if single and flags.stage != "naive":
        how = {"stage": "naive", "scale": scale, "device": place, **masks(flags)}
        results = {}
        if flags.direction == "backward":
            results = dict(zip(("out", "lse"), attention(q, k, v, return_lse=True, **how), strict=True))
        naive = attention_backward(q, k, v, dout, **results, **how)
    from_lse = "L" in kept(flags.stage, n=1) or flags.direction == "backward"
    group = q.shape[1] // k.shape[1]
    worst = {name: np.zeros(3) for name in ("dq", "dk", "dv")}
    for b, g in np.ndindex(k.shape[:2]):
        heads, of = np.s_[b, g * group : (g + 1) * group], np.s_[b, g : g + 1]
        part = q[heads], k[of], v[of], dout[heads]
        how = masks(flags) | {"first": (b * q.shape[1] + g * group, 0)}
        truth = reference.attention_backward(*part, scale, **how)
        places = heads, of, of
        error, own = (
            [
                np.abs(widened(x[at]) - expected).max(initial=0)
                for x, at, expected in zip(results, places, truth, strict=True)
            ]
            for results in (ours, naive or ours)
        )
        if is_half:
            bounds = exactness.half_gradient_bounds(*part, scale, q.dtype, causal=flags.causal)
            both = [worst_of(x[at], *rest) for x, at, *rest in zip(ours, places, truth, bounds.values())]
            error, limits = zip(*both)
        else:
            limits = exactness.gradient_bounds(*part, scale, dtype=q.dtype, from_lse=from_lse, **how).values()
        for name, *found in zip(worst, error, own, limits, strict=True):
            if not is_half:
                worst[name] = np.maximum(worst[name], found)  # NaN stays NaN
            elif not found[0] * max(worst[name][2], 1e-300) < worst[name][0] * found[2]:  # nearer to its limit
                worst[name] = np.array(found)
    return {
        name: (float(error), float(own) if single else None, float(limit + (2 * own if single else 0)))
        for name, (error, own, limit) in worst.items()
    }


def worst_of(got, expected, limits):
    """The |error| that is nearest to its own limit, or furthest beyond it, and that limit; NaN where there is one."""
    error = np.abs(widened(got) - expected)
    if not error.size:
        return 0.0, 0.0
    at = np.unravel_index((error / limits).argmax(), error.shape)  # of NaN, where it is
    return error[at], limits[at]


def half_errors(flags, out, q, k, v, scale):
    """`errors` of halves: a head of q at a time."""
    found = []
    for b, h in np.ndindex(q.shape[:2]):
        g = h // (q.shape[1] // k.shape[1])
        O = reference.attention(q[b, h], k[b, g], v[b, g], scale, causal=flags.causal)[0]
        limits = exactness.half_bounds(q[b, h], k[b, g], v[b, g], scale, q.dtype, causal=flags.causal)["out"]
        found.append(worst_of(out[b, h], O, limits))
    error, limit = max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0] / (pair[1] or 1))
    return float(error), None, float(limit)


def errors(flags, out, q, k, v, scale, place):
    """max|error| against float64, that of naive in float32 or None, and the bound: some rows of queries at a time."""
    if name_of(q.dtype) in HALVES:
        return half_errors(flags, out, q, k, v, scale)
    single = q.dtype == np.float32
    naive = None
    if single and flags.stage != "naive":
        naive = attention(q, k, v, stage="naive", scale=scale, device=place, **masks(flags))
    rows = max(1, SCORES_AT_ONCE // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    worst = np.zeros(5)  # NaN stays NaN in np.maximum
    for i in range(0, q.shape[2], rows):
        part, at = q[:, :, i : i + rows], np.s_[:, :, i : i + rows]
        end = max(0, i + part.shape[2] + k.shape[2] - q.shape[2]) if flags.causal else k.shape[2]  # the keys they see
        O = reference.attention(part, k[:, :, :end], v[:, :, :end], scale, **masks(flags), first=(0, i))[0]
        S = 0 if single else reference.scores(part, k, scale)
        derived = exactness.naive_bound(part, k, v, scale) / (1 - flags.dropout) if single and naive is None else 0
        off = 0 if naive is None else naive[at] - O
        worst = np.maximum(worst, [np.abs(x).max(initial=0) for x in (out[at] - O, off, O, S, np.asarray(derived))])
    error, own, largest, max_score, derived = map(float, worst)
    if single and naive is None:
        return error, None, derived
    limit = exactness.bound(largest, own, q.dtype, max_score=max_score, n_k=k.shape[2])
    return error, own if single else None, limit


# --- doctor -----------------------------------------------------------------------------------------------------------


def examine(flags):
    if flags.clear_cache:
        figures = doctor.clear_cache()
        page = ["deleted: {files} files, {size}, in {folder}".format(**figures)]
        output.show(page, figures, flags.json)
        return 0
    checks = doctor.examine()
    output.show(doctor.page(checks), doctor.figures(checks), flags.json)
    return 1 if any(check.verdict == doctor.PROBLEM for check in checks) else 0


def script():
    """The command as a process: `main`, and an exit without a traceback for Ctrl-C and for a reader that has left.

    To be ended or hung up on is an exit, too: what was started is ended, and the terminal put back.
    """
    came = []  # signals

    def leave(number, _):
        came.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def lost(ignored):
        """Signal again, a moment later, where a callback of weakref or the like has swallowed the exit."""
        if not came or not isinstance(ignored.exc_value, (KeyboardInterrupt, SystemExit)):
            return sys.__unraisablehook__(ignored)
        again = threading.Timer(0.1, os.kill, (os.getpid(), came[-1]))
        again.daemon = True
        again.start()

    sys.unraisablehook = lost
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) != signal.SIG_IGN:  # as nohup makes it
            signal.signal(number, leave)
    try:
        try:
            status = main()
        finally:
            if sys.stdout:  # None where it was closed
                sys.stdout.flush()
        return 128 + came[-1] if came else status
    except KeyboardInterrupt:
        report.console(sys.stderr).print("\nstopped by Ctrl-C")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(script())
