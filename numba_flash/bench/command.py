"""`python -m numba_flash bench`."""

from .. import lesson, output
from ..attention import MAX_D
from ..engine.launch import device
from ..stages import PORTABLE
from . import cpu, gpu

FOR_A_GPU = {"pass": "pass_", "batch": "batch", "heads": "heads", "causal": "causal", "stages": "stages"}


def add_command(command):
    sub = command("bench", run, "time the stages: on a GPU beside torch, elsewhere the CPU engine beside NumPy")
    number = lesson.whole_number
    n = f"N, queries and keys (default: {gpu.SIZES['n']} on a GPU, else {cpu.N})"
    sub.add_argument("--n", type=number(1, None), metavar="N", help=n)
    sub.add_argument("--d", type=number(1, MAX_D), default=64, metavar="D", help="d (default: %(default)s)")
    repeats = "runs of each, of which the median counts (default: %(default)s)"
    sub.add_argument("--repeats", type=number(1, None), default=5, metavar="R", help=repeats)
    sub.add_argument("--skip-simulator", action="store_true", help="no GPU: leave out Numba's simulator, a minute")
    what = "GPU: forward, backward, decode (one query, N keys) or all (default)"
    sub.add_argument("--pass", dest="pass_", choices=[*gpu.PASSES, "all"], metavar="PASS", help=what)
    for flag in ("batch", "heads"):
        what = f"GPU: as in attention (default: {gpu.SIZES[flag]})"
        sub.add_argument(f"--{flag}", type=number(1, None), metavar=flag[0].upper(), help=what)
    sub.add_argument("--causal", action="store_true", default=None, help="GPU: query i sees keys up to i")
    what = f"GPU: some of {', '.join(PORTABLE)} (default: all)"
    sub.add_argument("--stages", nargs="+", choices=PORTABLE, metavar="STAGE", help=what)
    output.add_json(sub)


def run(flags):
    place = device()
    given = {flag: getattr(flags, name) for flag, name in FOR_A_GPU.items() if getattr(flags, name) is not None}
    if place.name == "gpu":
        given["causal"] = given.get("causal", False)
        passes = gpu.PASSES if given.pop("pass", "all") == "all" else (flags.pass_,)
        sizes = gpu.SIZES | {"d": flags.d} | ({"n": flags.n} if flags.n else {})
        figures = gpu.run(passes=passes, repeats=flags.repeats, **sizes | given)
        output.show(gpu.page(figures), figures, flags.json)
        missing = flags.stages and any(set(flags.stages) & set(timed["left_out"]) for timed in gpu.parts(figures))
        return 1 if missing or not figures["right"] else 0
    if given:
        raise ValueError(
            f"--{next(iter(given))} is for a GPU, and kernels run on the CPU here: {place.why}; leave it out"
        )
    figures = cpu.run(flags.n, flags.d, flags.repeats, simulator=not flags.skip_simulator)
    output.show(cpu.page(figures), figures, flags.json)
    return 0 if all(stage["equal"] for stage in figures["cpu"].values()) else 1
