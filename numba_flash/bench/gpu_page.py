"""What `bench` prints on a GPU."""

from .. import report
from .peers import PEERS

TITLES = {"forward": "forward", "backward": "backward", "decode": "one query"}
MS, US = 1e3, 1e6


def page(figures):
    """The figures of `gpu.run` as report prints them."""
    facts = "batch {batch}, {heads} heads, N = {n:,}, d = {d}, float32".format(**figures)
    yield report.heading("Bench", facts + ", causal" * figures["causal"])
    yield ""
    yield from rates(figures)
    for direction, timed in figures["passes"].items():
        yield from a_pass(direction, timed, figures)
    if figures["left_out"]:
        yield report.prose("\n\n".join(trouble(figures | {"wrong": []})))
    if "counting" in figures:
        yield from counting(figures)
    if "launch" in figures:
        yield from launch(figures["launch"])
    yield report.prose(reading(figures))


def reading(figures):
    """How the tables are to be read."""
    counted = "4N²d per head forward and 10N²d, 2.5 times as many, backward" + ", half for causal" * figures["causal"]
    backward = "backward" in figures["passes"]
    float16 = any(row["dtype"] == "float16" for timed in figures["passes"].values() for row in timed["rows"].values())
    return f"""
        All that is in one table was run in turn, round by round; ms is the median. Times are those of CUDA events on
        the default stream, which torch and Numba share. The GPU sleeps while a run is launched, so ms leaves out what
        Python takes for that. Memory for our results is allocated, and filled with NaN, within it.
        {"Backward, nf.attention_backward first reads lse back to check it." * backward}

        FLOP are counted as {counted}. % copy compares with the copy the rate at which each of Q, K, V, O and their
        gradients would pass once: much of it means that the kernel waits for memory, little that it does not.
        {"float16 is another arithmetic: half the bytes, fewer digits, tensor cores." * float16}
    """


def rates(figures):
    rates, gpu = figures["rates"], figures["gpu"]
    rows = [
        [f"matmul, {name}", *(rate / 1e12 for rate in rates[name].values()), "TFLOP/s"]
        for name in ("float32", "TF32", "float16")
        if name in rates
    ]
    rows.append(["copy, read + written", *(rate / 1e9 for rate in rates["copy"].values()), "GB/s"])
    yield report.table(["this GPU reaches", "median", "min", "max", ""], rows)
    yield ""
    sizes = f"{gpu['name']}. The copy within its memory is of {report.in_bytes(rates['copied_bytes'])}."
    if figures["no_torch"]:
        yield report.prose(f"{sizes} {sentence(figures['no_torch'])}")
        return
    yield report.prose(
        f"{sizes} The matmuls are torch.matmul of {rates['side']:,} × {rates['side']:,}. float32 is without TF32, the "
        "tensor cores' float32 whose factors have 10 bits of fraction. torch's `efficient` multiplies float32 there all "
        "the same, by three products of TF32 (3xTF32), so this rate does not bound it. Our kernels use no tensor cores."
    )


def a_pass(direction, timed, figures):
    decode = direction == "decode"
    rows = timed["rows"]
    matmul = not decode and "float32" in figures["rates"]
    heads = ["ms", "min", "max", "GB/s" if decode else "TFLOP/s", *["% matmul"] * matmul, "% copy"]
    yield report.table([TITLES[direction], *heads], [cells(name, row, decode, matmul) for name, row in rows.items()])
    yield ""
    there = [peer for peer in PEERS if peer in rows]
    if there:
        ours = {name: row["speed"] for name, row in rows.items() if name not in PEERS}
        names = [f"{peer.removeprefix('torch ')} = 1" for peer in there]
        table = [[name, *speed.values()] for name, speed in ours.items()]
        yield report.table([f"speed, {TITLES[direction]}", *names], table)
        yield ""
    yield report.prose("\n\n".join(notes(direction, timed, figures)))


def cells(name, row, decode, matmul):
    rate = row["bytes_per_second"] / 1e9 if decode else row["flop_per_second"] / 1e12
    name = name if row["dtype"] == "float32" else f"{name}, {row['dtype']}"
    times = (MS * second for second in row["seconds"].values())
    of_matmul = "-" if row["of_matmul"] is None else f"{100 * row['of_matmul']:.3g}"
    return [name, *times, rate, *[of_matmul] * matmul, 100 * row["of_copy"]]


def notes(direction, timed, figures):
    """What is to be known of one pass, a paragraph each."""
    rows, l2 = timed["rows"], figures["gpu"]["l2_bytes"]
    keys = "One query and {n:,} keys per head. ".format(**figures) * (direction == "decode")
    held = "no run finds its input there" if timed["copied_bytes"] > l2 else "a run may find its input there"
    size, l2 = report.in_bytes(timed["copied_bytes"]), report.in_bytes(l2)
    yield f"{keys}Runs take {timed['copies']} copies of the input in turn, {size}; L2 has {l2}: {held}."
    if fewer := {name: row["runs"] for name, row in rows.items() if row["runs"] < figures["repeats"]}:
        runs = ", ".join(f"{name} {number}" for name, number in fewer.items())
        yield f"Fewer runs than {figures['repeats']}, since they add up to a second: {runs}."
    yield from trouble(timed)
    errors = [row["error"] for row in rows.values() if row["dtype"] == "float32"]
    if errors and not timed["wrong"]:
        yield f"Results in float32 are off float64 by {max(errors):.0e} of their largest element at most, as compared."


def trouble(part):
    for name, reason in part["left_out"].items():
        yield f"Left out: {name}. {sentence(reason)}"
    if part["wrong"]:
        yield f"WRONG: {', '.join(part['wrong'])}."


def sentence(text):
    return f"{text[:1].upper()}{text[1:]}" + "." * (not text.endswith("."))


def counting(figures):
    counting = figures["counting"]
    rows = [
        [stage, MS * row["plain"]["median"], MS * row["counted"]["median"], row["overhead"]]
        for stage, row in counting["rows"].items()
    ]
    few, there = [], figures["gpu"]["multiprocessors"]
    for stage, row in counting["rows"].items():
        if row["blocks"] < there:
            few.append(f"{stage} has {row['blocks']:,} blocks for {there} multiprocessors: a part of the GPU is idle.")
    yield report.table(["forward", "plain, ms", "counted, ms", "counted / plain"], rows)
    yield ""
    bills = "" if counting["wrong"] else "Every bill is as predicted. "
    yield report.prose("\n\n".join([f"Counted is inside `nf.ledger()`. {bills}", *few, *trouble(counting)]))


def launch(launch):
    rows = []
    for name, row in launch["rows"].items():
        call, kernel = row["call"], row["kernel"]["median"]
        numbers = [call["median"], kernel, row["added"], call["min"] - kernel]
        numbers += [row["bare"]["median"] - kernel] if "bare" in row else []
        rows.append([name, *(f"{US * seconds:.0f}" for seconds in numbers), *["-"] * ("bare" not in row)])
    yield report.table([f"N = {launch['n']}, µs", "call", "kernel", "added", "at least", "by Numba alone"], rows)
    yield ""
    text = f"""
        One head, on the GPU. call: from the call to the end of its kernel. kernel: what the GPU takes for it. added:
        the rest; at least: in the fastest call. by Numba alone: the rest where Numba launches the same kernel, and
        nothing is checked or allocated. Medians of {launch["repeats"]}, but for the least.
    """
    yield report.prose("\n\n".join([" ".join(text.split()), *trouble(launch | {"wrong": []})]))
