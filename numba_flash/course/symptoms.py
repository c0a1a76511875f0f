"""What a fault in a stage does: results against float64, the bill, strict mode, the order of threads, a loose test."""

import ast
import contextlib
import difflib
import linecache
import os
import types
import warnings
from dataclasses import dataclass, replace

import numpy as np

from .. import reference, stages, testing
from ..attention import attention, attention_backward
from ..engine import cpu
from ..errors import KernelError
from ..hbm.ledger import ledger
from ..hbm.predict import predict
from .faults import BARRIER, PACKAGE

TILES = {"naive": None, "tiled": 8, "online_softmax": 8, "flash": (8, 8), "flash2": (8, 8),
         "register_tiled": (8, 8)}  # fmt: skip
SPLITS = 3
ENTRIES = {  # of a pass: the field of a Stage, and the function of its file
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "atomic": ("backward_atomic", "backward"),
    "split": ("forward_split", "forward"),
}


# --- a fault in a stage -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A stage's file with a fault in it. `lines`: those that were changed, or between which one is missing; `head`:
    where the barrier at a loop's end is missing, those at the loop's head between which one would do the same.
    """

    source: str
    lines: tuple
    before: tuple  # the right lines that are changed or missing
    missing: bool
    head: tuple = ()


def plant(mutant):
    """Put a fault into the text of its file -> Planted. Where it turns a line into `pass`, the line goes."""
    right = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    wrong = mutant.apply(right)
    if mutant.fault.new.strip() == "pass":
        wrong = without_pass(wrong, right)
    old, new = right.splitlines(), wrong.splitlines()
    changes = [c for c in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if c[0] != "equal"]
    before = tuple(line for _, a, b, *_ in changes for line in old[a:b])
    lines = []
    for kind, _, _, a, b in changes:
        lines += range(a + 1, b + 1) if kind != "delete" else gap(new, a)
    missing = all(kind == "delete" for kind, *_ in changes)
    first = first_in_loop(right, changes[0][1] + 1) if missing and BARRIER in before[0] else None
    return Planted(wrong, tuple(lines), before, missing, tuple(gap(new, first - 1)) if first else ())


def first_in_loop(source, line):
    """The line of the first statement of the loop whose last one is in `line`; None where there is no such loop."""
    loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For | ast.While)]
    return next((loop.body[0].lineno for loop in loops if loop.body[-1].lineno == line), None)


def gap(lines, at):
    """The numbers of the lines of code before and after position `at`."""
    code = [number for number, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")]
    return [max(n for n in code if n <= at), min(n for n in code if n > at)]


def without_pass(wrong, right):
    """The source without the lines that became `pass`, and without the loops and branches that are empty then."""
    lines, old = wrong.splitlines(keepends=True), right.splitlines(keepends=True)
    gone = {number for number, (a, b) in enumerate(zip(lines, old, strict=True), 1) if a != b}
    parents = {child: node for node in ast.walk(ast.parse(wrong)) for child in ast.iter_child_nodes(node)}
    for node in parents:
        while isinstance(node, ast.stmt) and set(range(node.lineno, node.end_lineno + 1)) <= gone:
            node = parents[node]
            body = getattr(node, "body", [])
            if not body or not all(part.lineno in gone for part in body) or getattr(node, "orelse", []):
                break
            gone |= set(range(node.lineno, body[0].lineno))
    return "".join(line for number, line in enumerate(lines, 1) if number not in gone)


def load(source, name):
    """A stage's module made from a text: `name` is its file's, in which errors find the text's lines."""
    file = f"<lab>/{name}"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    module = types.ModuleType(f"{stages.__name__}.{name.removesuffix('.py')}")
    module.__package__, module.__file__ = stages.__name__, file
    exec(compile(source, file, "exec"), vars(module))
    return module


@contextlib.contextmanager
def installed(mutant, source):
    """Within the body, the mutant's stage runs the module that `source` gives."""
    module = load(source, mutant.file.rpartition("/")[2])
    field, function = ENTRIES[mutant.direction]
    right = stages.STAGES[mutant.stage]
    stages.STAGES[mutant.stage] = replace(right, **{field: getattr(module, function)})
    try:
        yield module
    finally:
        stages.STAGES[mutant.stage] = right


# --- the inputs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """One input. shape: batch, heads, kv_heads, N, N_k, d. score: every score is that, with a scale of 1/4.

    `how` are keywords of `attention`; needs: what a test has to have, to see what this one shows.
    """

    what: str
    needs: str
    shape: tuple
    how: dict = None
    scale: float | None = None
    score: int | None = None
    hidden: bool = False  # a key mask, which hides all keys of the second batch
    alone: bool = False  # the backward pass without out and lse

    def arrays(self):
        """q, k, v, dout, and the keywords of `attention`."""
        B, H, G, N, N_k, d = self.shape
        rng = np.random.default_rng(sum(self.shape))
        q, k, v = testing.inputs((B, H, N, d), (B, G, N_k, d), seed=sum(self.shape))
        if self.score:
            q, k = np.full_like(q, -(2.0**4)), np.full_like(k, 4 * abs(self.score) / (2.0**4 * d))
        how = dict(self.how or {})
        if self.hidden:
            how["key_mask"] = rng.random((B, N_k)) < 0.6
            how["key_mask"][0, 0], how["key_mask"][1] = True, False
        return q, k, v, rng.standard_normal(q.shape, np.float32), how


RAGGED = "lengths that are no multiple of the tiles, such as N = 37, N_k = 29, d = 12 with tiles of 8"
INPUTS = {
    "whole": Input("whole tiles: N = N_k = 32, d = 16", "scores that differ, and several tiles", (1, 1, 1, 32, 32, 16)),
    "ragged": Input("ragged: N = 37, N_k = 29, d = 12", RAGGED, (1, 1, 1, 37, 29, 12)),
    "short": Input("short: N = 5, N_k = 3, d = 4", "one tile that is not full: N = 5, N_k = 3", (1, 1, 1, 5, 3, 4)),
    "low": Input("low: every score is -256", "scores far below 0, such as -256", (1, 1, 1, 19, 37, 16), score=-256),
    "lowest": Input(
        "lowest: every score is -2^101", "scores below every sentinel: -2^101", (1, 1, 1, 19, 37, 16), score=-(2**101)
    ),
    "scale": Input("scale = 0.3", "another scale than 1/√d, such as 0.3", (1, 1, 1, 17, 23, 12), scale=0.3),
    "heads": Input("4 heads on 2 of K, V", "heads of Q that share a head of K and V", (2, 4, 2, 17, 23, 12)),
    "causal": Input(
        "causal, N = 21, N_k = 30", "causal=True, with N ≠ N_k", (1, 2, 1, 21, 30, 12), {"causal": True}
    ),
    "early": Input(
        "causal, N = 30, N_k = 21", "rows that see no key, as with causal=True where N > N_k", (1, 2, 1, 30, 21, 12),
        {"causal": True},
    ),
    "keys": Input(
        "key mask; batch 2 sees none", "a key mask for each batch, one of which hides all", (2, 2, 1, 17, 23, 12),
        hidden=True,
    ),
    "hidden": Input(
        "causal, every score -2^101", "a mask, where the scores are far below any sentinel", (1, 1, 1, 19, 37, 16),
        {"causal": True}, score=-(2**101),
    ),
    "dropout": Input(
        "dropout of 0.3, two heads", "dropout, compared by seed with dropout.to_dense", (1, 2, 1, 21, 30, 12),
        {"dropout_p": 0.3, "seed": 5},
    ),
    "alone": Input(
        "without out, lse; a key mask", "attention_backward without out and lse, also with rows that see no key",
        (2, 2, 1, 37, 29, 12), hidden=True, alone=True,
    ),
}  # fmt: skip
EASY = "whole", "ragged", "short", "low", "lowest", "scale"
STRICT = "whole", "ragged", "short"


def inputs_of(direction, easy=False):
    """The names of the inputs that a pass is tried with."""
    left_out = {"forward": ["alone"], "split": ["alone", "dropout"]}.get(direction, ["lowest", "hidden"])
    return [name for name in (EASY if easy else INPUTS) if name not in left_out]


# --- what it does -----------------------------------------------------------------------------------------------------


@dataclass
class Finding:
    """What one input showed. `errors`: result -> (largest error, bound); `wrong`: result -> boolean array."""

    name: str
    raised: Exception | None = None
    errors: dict = None
    wrong: dict = None
    first: tuple | None = None  # the first wrong element: result, index, got, expected
    diff: list = None  # of the bill, counted against predicted

    @property
    def right(self):
        return self.raised is None and not any(x.any() for x in self.wrong.values())


@dataclass
class Symptoms:
    """All that is found out about a stage.

    strict: (input, what strict mode said) or None. orders: whether two orders of the threads gave the same, None where
    nothing could be compared. loose: whether the usual weak test passes.
    """

    findings: list
    strict: tuple | None
    orders: bool | None
    loose: bool

    @property
    def wrong(self):
        return [finding for finding in self.findings if not finding.right]

    @property
    def billed(self):
        return [finding for finding in self.findings if finding.diff]

    @property
    def kinds(self):
        """The names of the inputs with a wrong result; "bill", or "causal bill", where that is wrong; "strict"."""
        billed = [finding.name for finding in self.billed]
        bill = ["bill"] if set(billed) & set(EASY) else ["causal bill"] if "causal" in billed else []
        return [finding.name for finding in self.wrong] + bill + ["strict"] * bool(self.strict)


class Right:
    """What the right kernels give, computed before a fault is put in: {input: (results, bounds)}."""

    def __init__(self, stage, direction):
        self.stage, self.direction = stage, direction
        self.kept = {}

    def of(self, name):
        if name not in self.kept:
            self.kept[name] = self.compute(INPUTS[name])
        return self.kept[name]

    def compute(self, one):
        q, k, v, dout, how = one.arrays()
        scale = q.shape[-1] ** -0.5 if one.scale is None else one.scale
        scale = 0.25 if one.score else float(np.float32(scale))
        naive = {"stage": "naive", "scale": scale, "device": "cpu", **how}
        O, L = reference.attention(q, k, v, scale, **how)
        out, lse = attention(q, k, v, return_lse=True, **naive)
        if self.direction in ("forward", "split"):
            truth = {"out": O, "lse": L}
            sizes = {"out": O, "lse": np.append(L[np.isfinite(L)], 1)}
            own = {name: error(x, truth[name]).max() for name, x in (("out", out), ("lse", lse))}
            limits = {name: testing.bound(sizes[name], own[name], n_k=k.shape[-2]) for name in truth}
            return truth, limits, {}
        mine = attention(q, k, v, return_lse=True, stage=self.stage, scale=scale, device="cpu", **how)
        names = "dq", "dk", "dv"
        truth = dict(zip(names, reference.attention_backward(q, k, v, dout, scale, **how), strict=True))
        found = attention_backward(q, k, v, dout, out=out, lse=lse, **naive)
        own = [error(x, y).max() for x, y in zip(found, truth.values(), strict=True)]
        limits = testing.gradient_bounds(q, k, v, dout, scale, own, from_lse=True, **how)
        return truth, limits, {} if one.alone else dict(zip(("out", "lse"), mine, strict=True))


def error(got, truth):
    """|got − truth|, 0 where both are the same infinity, NaN where one is not a number."""
    with np.errstate(invalid="ignore"):
        return np.where(got == truth, 0, np.abs(got - truth))


def run(stage, direction, name, kept):
    """One pass on one input -> {result: array}."""
    one = INPUTS[name]
    q, k, v, dout, how = one.arrays()
    scale = 0.25 if one.score else one.scale
    how |= {"stage": stage, "scale": scale, "device": "cpu", "blocks": TILES[stage]}
    if direction == "split":
        how |= splits(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if direction in ("forward", "split"):
            return dict(zip(("out", "lse"), attention(q, k, v, return_lse=True, **how), strict=True))
        results = attention_backward(q, k, v, dout, deterministic=direction == "backward", **kept, **how)
    return dict(zip(("dq", "dk", "dv"), results, strict=True))


def splits(stage):
    """The keywords of a pass whose keys are split among blocks: a tile has one query."""
    return {"split_kv": SPLITS, "blocks": (1, TILES[stage][1])}


def predicted(stage, direction, name):
    one = INPUTS[name]
    B, H, G, N, N_k, d = one.shape
    sizes = {"batch": B, "heads": H, "kv_heads": G, "n": N, "n_k": N_k, "d": d, "blocks": TILES[stage]}
    how = {key: value for key, value in (one.how or {}).items() if key != "seed"} | {"key_mask": one.hidden}
    if direction == "forward":
        return predict(stage, return_lse=True, **sizes, **how)
    if direction == "split":
        return predict(stage, **sizes | splits(stage), **how)
    how |= {"direction": "both" if one.alone else "backward", "deterministic": direction == "backward"}
    return predict(stage, **sizes, **how)


def examine(mutant, source, names, advance=lambda: None):
    """Put the text in the place of the mutant's file and find out what it does -> Symptoms. names: of inputs."""
    stage, direction = mutant.stage, mutant.direction
    right = Right(stage, direction)
    for name in names:
        right.of(name)
    findings = []
    with installed(mutant, source):
        for name in names:
            findings.append(finding(stage, direction, name, *right.of(name)))
            advance()
        calm = [f.name for f in findings if f.name in STRICT and not f.raised]
        strict = (strict_mode(stage, direction, name, right.of(name)[2]) for name in calm)
        strict = next(filter(None, strict), None)
        advance()
        agree = orders(stage, direction, names[0], right.of(names[0])[2])
        loose = passes_loosely(stage, direction)
        advance()
    return Symptoms(findings, strict, agree, loose)


def finding(stage, direction, name, truth, limits, kept):
    try:
        with ledger() as bill:
            got = run(stage, direction, name, kept)
    except (KernelError, IndexError, ValueError, ArithmeticError) as raised:
        return Finding(name, raised)
    errors = {what: error(x, truth[what]) for what, x in got.items()}
    wrong = {what: ~(off <= limits[what]) for what, off in errors.items()}
    largest = {what: (float(off.max(initial=0)), limits[what]) for what, off in errors.items()}
    first = next(((what, tuple(map(int, np.argwhere(x)[0]))) for what, x in wrong.items() if x.any()), None)
    first = first and (*first, float(got[first[0]][first[1]]), float(truth[first[0]][first[1]]))
    return Finding(name, None, largest, wrong, first, bill.diff(predicted(stage, direction, name)))


def strict_mode(stage, direction, name, kept):
    """(input, what strict mode says) or None."""
    before = os.environ.get("NUMBA_FLASH_STRICT")
    os.environ["NUMBA_FLASH_STRICT"] = "1"
    try:
        run(stage, direction, name, kept)
    except KernelError as said:
        return name, said
    finally:
        os.environ.pop("NUMBA_FLASH_STRICT")
        if before is not None:
            os.environ["NUMBA_FLASH_STRICT"] = before
    return None


def orders(stage, direction, name, kept):
    """Whether blocks and threads in another order give the same bits (sums by atomics: nearly the same)."""
    try:
        straight = run(stage, direction, name, kept)
        with cpu.shuffled_blocks(1, threads=True):
            shuffled = run(stage, direction, name, kept)
    except KernelError:
        return None
    pairs = [(straight[what], shuffled[what]) for what in straight]
    if direction == "atomic":
        return all(np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in pairs)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def passes_loosely(stage, direction):
    """np.allclose(atol=1e-2) on one head of standard normal numbers, N = 64, d = 16, dO = 1: the usual weak test.

    In several tiles, so that a fault which needs two of them is there to be seen.
    """
    q, k, v = np.random.default_rng(0).standard_normal((3, 64, 16), dtype=np.float32)
    dout, how = np.ones_like(q), {"stage": stage, "blocks": TILES[stage]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if direction in ("forward", "split"):
                how |= splits(stage) if direction == "split" else {}
                got, expected = [attention(q, k, v, **how)], [reference.attention(q, k, v)[0]]
            else:
                got = attention_backward(q, k, v, dout, deterministic=direction != "atomic", **how)
                expected = reference.attention_backward(q, k, v, dout)
    except Exception:  # whatever the fault leads to
        return False
    return all(np.allclose(one, other, atol=1e-2) for one, other in zip(got, expected, strict=True))
