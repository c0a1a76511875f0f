# %% [markdown]
"""Lesson 07, the backward pass. Run `python lessons/07_backward.py`, or open it as a notebook."""

# %%
import contextlib
import math

import numpy as np
from numba import float32

import numba_flash as nf
from numba_flash import lesson, reference, report
from numba_flash.blocks import STREAM, check_blocks, tiles
from numba_flash.engine import cpu
from numba_flash.hbm.predict import algorithm0, kept
from numba_flash.lesson import plural
from numba_flash.masks import no_mask
from numba_flash.questions import Question
from numba_flash.stages import LADDER, flash2_backward, flash_backward, naive_backward

this = lesson.start("07 · backward", n=512, stage="flash2", direction="backward", blocks=None,
                    meanings={"blocks": "Br queries and Bc keys that a block of flash2's kernels owns"})  # fmt: skip
N, d, H, where = this.n, this.d, this.heads, this.device
none = no_mask()                                             # masks are for lesson 08
flash_Bc = check_blocks("flash", None, d=d, direction="backward").Bc
Br, Bc = check_blocks("flash2", this.blocks, d=d, direction="backward")
Tc, Tr2, Tc2 = tiles(N, flash_Bc), tiles(N, Br), tiles(N, Bc)

this.part("The question")
this.text("""
Training needs gradients. A loss depends on O; the layers above hand down dO, which says how the loss changes with
each element of O. The backward pass of attention turns dO into dQ, dK and dV.

Standard attention keeps P from the forward pass for that, an N × N matrix. FlashAttention has stored neither S nor P.
How can it find the gradients, and does it pay to compute something twice?
""")


# %% The derivation, and code beside it.
def gradients(Q, K, V, dO, scale):
    S = scale * Q @ K.T
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P = P / P.sum(axis=1, keepdims=True)
    dV = P.T @ dO                                            # from O = P V
    dP = dO @ V.T                                            # from O = P V
    D = (P * dP).sum(axis=1, keepdims=True)
    dS = P * (dP - D)                                        # from P = softmax(S), row by row
    dQ = scale * dS @ K                                      # from S = scale · Q Kᵀ
    dK = scale * dS.T @ Q                                    # from S = scale · Q Kᵀ
    return dQ, dK, dV


this.part("The derivation")
this.text("""
Write F for the loss in this part, and dX for the matrix of ∂F/∂X_ij. Each step of attention is undone by the chain
rule, from the last to the first.

O = P V, or O_it = ∑_j P_ij·V_jt. So ∂O_it/∂P_ij = V_jt and ∂O_it/∂V_jt = P_ij, and the chain rule sums over all O_it
that an element has a part in:

    dP_ij = ∑_t dO_it·V_jt     which is dP = dO Vᵀ
    dV_jt = ∑_i P_ij·dO_it     which is dV = Pᵀ dO

P = softmax(S). In one row P_j = exp(S_j)/∑_k exp(S_k). (To subtract the maximum from all S_k first changes no P_j, and
so no derivative.) By the quotient rule ∂P_j/∂S_k is P_k - P_k·P_k for j = k, and -P_j·P_k otherwise. Then

    dS_k = ∑_j dP_j·∂P_j/∂S_k = dP_k·P_k - ∑_j dP_j·P_j·P_k
         = P_k·(dP_k - D)     with D = ∑_j P_j·dP_j

S = scale·Q Kᵀ. As in the first step: dQ = scale·dS K and dK = scale·dSᵀ Q. In NumPy:
""")
this.source(gradients)
this.text("""
D has a second form, which is the key to this lesson. Put dP_j = ∑_t dO_t·V_jt into it and sum over j first:

    D = ∑_j P_j·∑_t dO_t·V_jt = ∑_t dO_t·∑_j P_j·V_jt = ∑_t dO_t·O_t

So D_i comes from row i of dO and row i of O, d products. It needs no row of P. For all rows at once this is written
D = rowsum(dO ∘ O): ∘ is the product element by element, and rowsum the sum of each row.
""")

# %% A test of the formulas.
n = min(N, 64)
Q, K, V, dO = (x[0, :n].astype(np.float64) for x in (*this.inputs, this.dout))
scale, h, rng = 1 / math.sqrt(d), 1e-5, np.random.default_rng(this.seed)
rows = []
for at, (name, dX) in enumerate(zip("QKV", gradients(Q, K, V, dO, scale))):
    step = rng.standard_normal(dX.shape)
    ends = [[X + sign * h * step * (i == at) for i, X in enumerate((Q, K, V))] for sign in (1, -1)]
    up, down = ((reference.attention(*inputs)[0] * dO).sum() for inputs in ends)
    measured, said = (up - down) / (2 * h), (dX * step).sum()
    rows.append([name, f"{measured:.9f}", f"{said:.9f}", f"{abs(measured - said) / max(abs(said), 1):.0e}"])
this.text(f"""
A test that believes nothing: let F = ∑dO_it·O_it, whose derivative by O is dO. Move Q, K or V by +h·R and by -h·R, R a
matrix of random numbers and h = {h:g}, and measure the slope, (F after the one - F after the other)/2h. By the
formulas it is ∑dQ_it·R_it, and the same for K and V. ({f"First {n} rows" if n < N else "All rows"} of head 0, float64.)
""")
this.show(report.table(["moved", "slope, measured", "by the formulas", "relative difference"], rows), "")

# %% Algorithm 3.
this.part("Standard: keep P")
this.text("""
Algorithm 3 of the paper is this function with P kept from the forward pass: five steps, and each result goes to
HBM. dP and dS are N × N matrices, too. In the stage `naive` a step is a kernel with one thread per element, but for
`backward_dS`, which has one per row:
""")
this.source(naive_backward.make_dS(float32), "D_i = real", "Alg. 3")
this.text("""
`tiled` and `online_softmax` compute the products in shared tiles, as in lesson 03. (online_softmax never stored
P. It keeps S, m and l, and forms P first: to spare P in the forward pass alone is no gain in training.)
""")

# %% Algorithm 4.
this.part("FlashAttention: recompute")
this.text("""
A row's softmax is fixed by two numbers, m and l, and all of S_ij comes from Q_i and K_j:

    P_ij = exp(S_ij - m_i)/l_i = exp(S_ij - L_i)        with L = m + log l

No maximum to search for, no sum to wait for: the second time, each element of P can be computed alone. Algorithm 4
keeps O, l and m (FlashAttention-2: O and L) and computes P once more, a tile at a time:
""")
this.show(report.table(["line", "what it says"], [
    ["5", "in HBM: dQ = 0 (dK and dV too; our kernel writes each of these once, and needs no zeros)"],
    ["6, 7, 8", "for each tile j of keys: load K_j, V_j; on chip dK_j = 0, dV_j = 0"],
    ["9, 10", "for each tile i of queries: load Q_i, O_i, dO_i, dQ_i, l_i, m_i"],
    ["11, 13", "S_ij = scale·Q_i K_jᵀ, P_ij = exp(S_ij − m_i)/l_i, on chip, as all of these"],
    ["16, 17", "dV_j += P_ijᵀ dO_i, dP_ij = dO_i V_jᵀ"],
    ["19, 20", "D_i = rowsum(dO_i ∘ O_i), dS_ij = P_ij ∘ (dP_ij − D_i)"],
    ["21", "store dQ_i = dQ_i + scale·dS_ij K_j"],
    ["22", "dK_j += scale·dS_ijᵀ Q_i"],
    ["24", "store dK_j, dV_j"],
]), "")
this.text(f"""
(12, 14, 15 and 18 are masks and dropout, lessons 08 and 09: here every pair is allowed, and z, from `keep`, is 1.
`weight` is the guarded exp of lesson 04.) In our kernel a thread has one of the Bc = {flash_Bc} keys of a tile, c, and
rows of its own of dK_j and dV_j. The queries r pass by, in tiles of Br = {STREAM}, and it meets them one after another.
D_i has been computed before these lines:
""")
kernel = flash_backward.make_backward(STREAM, flash_Bc, d, float32, none.allowed, none.first(), none.keep(float32))
this.source(kernel, "if j + c", "nobody still reads")
this.text("""
dK_j and dV_j are sums over queries, which one thread meets one by one. (The scale of line 22 is left to the end: dK_j
is multiplied once, when it is stored.) dQ_i is a sum over keys, which lie in all threads and all tiles: so dS_ij goes
through shared memory, and dQ to HBM and back at every tile of keys.
""")

# %% The prediction, by hand.
this.part("A prediction: products and traffic")
x = this.draw(N=range(100, 400, 20), d=(16, 24, 40), Tc=(3, 4, 5, 6), H=range(2, 7))
this.ask("""
Count the products of two matrices (each is 2N²d FLOPs): how many does Algorithm 3 have, and how many Algorithm 4? Then,
for one head, with Tc tiles of keys, write a formula in N, d and Tc for what Algorithm 4 moves: loads of K and V; loads
of Q, O and dO; loads of l and m; loads and stores of dQ; stores of dK and dV. And what does line 5 store?
""",
    Question("products", x, "how many FLOPs do the products of Algorithm 4 take?",
        5 * 2 * x.H * x.N**2 * x.d, "5 products: S, dV, dP, dQ and dK, of 2N²d each.",
        "Lines 11, 16, 17, 21 and 22 each have a product of two matrices. Which of them does Algorithm 3 not need?",
        [(8 * x.H * x.N**2 * x.d, "Those are the four of Algorithm 3. Algorithm 4 computes S once more."),
         (5 * x.H * x.N**2 * x.d, "A product of two numbers is one FLOP, and adding it is another."),
         (14 * x.H * x.N**2 * x.d, "That is with the forward pass. The question is for Algorithm 4 alone.")]),
    Question("dQ", x, "how many elements of dQ does Algorithm 4 load and store, line 5 included?",
        x.H * (2 * x.Tc + 1) * x.N * x.d, "Stored once by line 5, loaded and stored Tc times: H·(1 + 2Tc)·Nd.",
        "Line 10 loads a tile of dQ, line 21 stores it. How often does the inner loop pass over all of them?",
        [(x.H * 2 * x.Tc * x.N * x.d, "Line 5 stores dQ, too."),
         (x.H * x.Tc * x.N * x.d, "Line 10 loads it and line 21 stores it, and line 5 stores it first."),
         (x.H * x.N * x.d, "dQ_i makes a round trip at each tile of keys.")]),
)  # fmt: skip
by_hand = [
    ("initialise_dQ", "dQ stores", "line 5", "Nd", N * d),
    ("flash_backward", "K, V loads", "line 7, each once", "2Nd", 2 * N * d),
    ("", "Q, O, dO loads", "line 10, Tc times", "3Tc·Nd", 3 * Tc * N * d),
    ("", "l, m loads", "line 10, Tc times", "2Tc·N", 2 * Tc * N),
    ("", "dQ loads, stores", "lines 10, 21, Tc times", "2Tc·Nd", 2 * Tc * N * d),
    ("", "dK, dV stores", "line 24, each once", "2Nd", 2 * N * d),
]
predicted = nf.predict("flash", n=N, d=d, heads=H, direction="both")
forward = nf.predict("flash", n=N, d=d, heads=H)
assert predicted.elements == forward.elements + H * sum(elements for *_, elements in by_hand)
this.text(f"""
Algorithm 3 has 4 products: dV, dP, dQ and dK. Algorithm 4 has 5, since it computes S again. Its traffic for one head,
with Bc = {flash_Bc}, so that Tc = {Tc}:
""")
this.show(report.table(["kernel", "tensor", "why", "formula", "elements"], by_hand), "")
standard = (7 * N * N + 8 * N * d) / sum(elements for *_, elements in by_hand)
this.text(f"""
Algorithm 3, if each step reads its operands once, moves 7N² + 8Nd = {7 * N * N + 8 * N * d:,} elements: P and dS two
reads each, dP one, dP and dS a write each. That is {standard:.2f} times as much.
""")

# %% The run.
this.part("The run and its bill")
this.running("the stages' backward passes, naive to flash2")
ideal = {part: algorithm0(n=N, d=d, heads=H, direction=part) for part in ("forward", "backward", "both")}
bills, found, errors = {}, {}, {}
settings = {stage: this.blocks if stage == "flash2" else None for stage in LADDER}
for stage, blocks in settings.items():
    with nf.ledger() as bills[stage]:
        found[stage] = nf.attention_backward(*this.inputs, this.dout, stage=stage, blocks=blocks, device=where)
    errors[stage] = this.exact_gradients(stage, found[stage], found["naive"])
yardstick = {"algorithm0": ideal["both"], "ideal": "Algorithms 0, 3"}
this.bill("flash", bills["flash"], predicted=predicted, **yardstick, below=errors["flash"])
this.text("""
`initialise` and `flash` are the forward pass. Algorithms 0 and 3 together move 11N² + 12Nd elements per head.
""")

# %% flash2.
this.part("flash2: each result has one owner")
this.text(f"""
In Algorithm 4 dQ makes a round trip at every tile of keys, and all tiles of keys wait for each other, since they add
to the same dQ. FlashAttention-2 (Dao 2023, arXiv:2307.08691, Algorithm 2) computes D once, before all else, and lets
each tile of keys be a block of threads. How is dQ formed then? There all blocks add to it in HBM, by atomic additions
(its section 3.2); that comes below. The stage flash2 does otherwise by default, which is this course's choice and not
the paper's: a second kernel owns dQ, with the loops exchanged.

    rowsum         D = rowsum(dO ∘ O)
    backward_dKdV  a block owns {plural(Bc, "key")}; the queries pass by; stores dK_j, dV_j
    backward_dQ    a block owns {f"{Br} queries" if Br > 1 else "1 query"}; the keys pass by; stores dQ_i

The loop of backward_dQ. "Alg. 2" in its comments is that of FlashAttention-2; `keep` is dropout, and 1 here:
""")
functions = none.allowed, none.seen, none.visited, none.keep(float32)
this.source(flash2_backward.make_dQ(Br, STREAM, d, float32, *functions), "if i < N:", "Alg. 2, l. 15")
predicted2 = nf.predict("flash2", n=N, d=d, heads=H, blocks=this.blocks, direction="both")
this.bill("flash2", bills["flash2"], predicted=predicted2, **yardstick, below=errors["flash2"])
this.text(f"""
S, P and dP are computed in both kernels: 4 products in the first, 3 in the second, 7 in all. What passes by, in tiles
of {STREAM} rows, is read once per tile of what stays: Tc = {Tc2} times Q and dO, Tr = {Tr2} times K and V. How
many rows pass by at a time makes no difference to the bill.
""")

# %% FLOPs up, bytes down.
this.part("The FLOPs went up, the bytes went down")
rows, traffic = [], {"Algorithms 0 and 3": ideal["both"].elements}
for stage in LADDER:
    parts = [nf.predict(stage, n=N, d=d, heads=H).elements]
    parts += [bills[stage].elements - parts[0], bills[stage].elements]
    assert bills[stage] == nf.predict(stage, n=N, d=d, heads=H, direction="both", blocks=settings[stage])
    work = nf.flops(stage, n=N, d=d, heads=H, direction="both", blocks=settings[stage])
    rows.append([stage, *parts, f"{parts[2] / ideal['both'].elements:.2f}", work])
    traffic |= {stage: parts[2]} if stage != "naive" else {}
this.text("""
Here a backward pass comes right after its forward pass. Counted are the elements that each of the two moves, and
their sum; `/ ideal` is the sum divided by that of Algorithms 0 and 3; the FLOPs are those of both passes. (naive and
tiled find in HBM the P that their forward pass has stored. If O and L alone had been kept, they would have to form it
first.)
""")
this.show(report.table(["stage", "forward", "backward", "both", "/ ideal", "FLOPs"], rows), "")
this.show(report.bars(traffic), "")
FP32, TENSOR, BANDWIDTH = 19.5e12, 312e12, 1.555e12          # NVIDIA A100 datasheet, as in lesson 01
per_load = 4 * FP32 / BANDWIDTH, 2 * TENSOR / BANDWIDTH      # FLOPs in the time of a load, of 4 bytes and of 2
ratio = rows[3][5] / rows[0][5]
this.text(f"""
(The bar of naive would be {rows[0][3] / rows[1][3]:.3g} times as long as that of tiled.) flash does {ratio:.2f} times
the work of naive, and flash2 {rows[4][5] / rows[0][5]:.2f} times. In whole products: 2 forward and 4 backward are 6;
with S once more 7; with S once more in each of two kernels, and dP in both, 9.

When does it pay to compute S again? Compare what one score costs.

    what is spared  Algorithm 3 loads or stores 7 elements per score, and the
                    forward pass stores 1, of P: the time of 8 loads.
    what is paid    one more product: 2d = {2 * d} FLOPs per score.

How many loads would take as long as these FLOPs? By the peak rates of an A100 (its datasheet):

    float32         In the time of one load, of 4 bytes, there is time for
                    {per_load[0]:.0f} FLOPs. So {2 * d} FLOPs take as long as {2 * d / per_load[0]:.2g} loads.
    tensor cores    In the time of one load, of 2 bytes, there is time for
                    {per_load[1]:.0f} FLOPs. So {2 * d} FLOPs take as long as {2 * d / per_load[1]:.2g} loads.

It pays where that is less than 8. (Against a kernel that reads P, but fuses the rest, it has to be less than 2 or 3: a
store, and a load or two. That kernel would still need memory for N² elements.)
""")

# %% Memory.
this.part("What is kept between the passes")
x = this.draw(N=(2048, 4096, 8192, 16384), H=(8, 12, 16), b=(3, 5, 7))
P, O_L = (sum(kept(stage, n=x.N, heads=x.H, batch=x.b).values()) for stage in ("naive", "flash2"))
this.ask("",
    Question("kept", x, """how many bytes does naive keep between the passes beside Q, K, V and O, with a batch of b
        and 2 bytes per element?""", 2 * P, "P, N² elements of 2 bytes for each head of each text: 2·b·H·N².",
        "Which N × N matrix does Algorithm 3 read that the forward pass has made? How many such matrices are there?",
        [(P, "Those are elements. Each has 2 bytes."), (4 * P, "That is with 4 bytes per element."),
         (2 * P // x.b, "That is for one text of the batch."),
         *((size * O_L, "That is flash2, which keeps L, one number per row. naive keeps P.") for size in (2, 4))]),
)  # fmt: skip
rows = []
for stage in LADDER:
    has = kept(stage, n=N, heads=H)
    large = kept(stage, n=65_536, heads=8, batch=16)
    size = sum(elements * (4 if tensor in ("l", "m", "L") else 2) for tensor, elements in large.items())
    rows.append([stage, " ".join(has), sum(has.values()), report.in_bytes(size)])
this.text("""
All stages keep Q, K and V as well, and flash and flash2 also keep O. (Algorithm 3 does not need O: it gets D from P and
dP.) What else they keep is in the table. Its last column is for batch 16 and 8 heads of N = 65,536 (the paper's
Table 21 ends there; its A100 has 40 GB). There elements have 2 bytes, but those of l, m and L have 4: in half precision
too these stay float32. L stands in an exponent, where its rounding error becomes a relative error of P.
""")
this.show(report.table(["stage", "keeps", "elements", "at N = 65,536"], rows), "")
this.text("""
N² against N. This is why a longer context fits into memory with FlashAttention, and it is the part of the gain that
does not depend on how fast the HBM is.
""")

# %% Determinism.
this.part("Who adds, and in which order")
third = [np.float32(x) for x in (1e8, -1e8, 1.5)]
this.text(f"""
The other way to form dQ, that of the CUDA package by default: each block of keys adds its part to dQ in HBM, with an
atomic addition, so that no addition of another block is lost. One kernel, five products. But the blocks run in no
fixed order, and floating-point sums depend on the order. In float32:

    (1e8 + -1e8) + 1.5 = {(third[0] + third[1]) + third[2]:g}
    1e8 + (-1e8 + 1.5) = {third[0] + (third[1] + third[2]):g}
""")
on_cpu = nf.device(where).name != "gpu"
n = min(N, 128)
small = [x[:, :n] for x in (*this.inputs, this.dout)]
truth = reference.attention_backward(*small)[0]
this.running("both variants of flash2 20 times")
rows = []
for name, deterministic in (("owners", True), ("atomics", False)):
    runs = []
    for run in range(20):
        with cpu.shuffled_blocks(run) if on_cpu else contextlib.nullcontext():
            runs.append(nf.attention_backward(*small, deterministic=deterministic, blocks=(8, 8), device=where))
    spread = max(float(np.abs(x[0] - y[0]).max()) for x in runs for y in runs)
    different = [len({x[at].tobytes() for x in runs}) for at in range(3)]
    bill = nf.predict("flash2", n=N, d=d, heads=H, direction="both", deterministic=deterministic, blocks=this.blocks)
    work = nf.flops("flash2", n=N, d=d, heads=H, direction="both", deterministic=deterministic, blocks=this.blocks)
    error = max(float(np.abs(x[0] - truth).max()) for x in runs)
    rows.append([name, *different, f"{spread:.0e}" if spread else "0", f"{error:.0e}", bill.elements, work])
    this.figures[name] = {"different": different, "spread": spread}
this.text(f"""
How many different results came out of 20 runs of {f"the first {n} rows" if n < N else "all rows"} with tiles of 8 keys
({"blocks in a random order, which our engine draws" if on_cpu else "on this GPU"}), how far apart two dq are at most;
the largest error of dq against float64; and for all N the elements and FLOPs of both passes, predicted:
""")
this.show(report.table(["dq by", "dq", "dk", "dv", "apart", "error", "elements", "FLOPs"], rows), "")
this.text("""
Both are right to within rounding. With owners the bits are the same in every run: a failed run can be repeated, and two
versions of a program can be compared bit by bit. dk and dv have owners in both variants. (A third way is between
them: groups of blocks add to copies of dQ of their own, which are summed in a fixed order.)

Which is faster depends on the machine: the atomics have fewer products, and a queue at each address. An atomic counts
as a read and a write in the bill.
""")

this.part("Your turn")
keys = next(keys for keys in (Bc // 2, Bc // 4, 4, 2, 1, 3) if keys and (tiles(N, keys) != Tc2 or keys == 3))
half = Br, keys
then = nf.predict("flash2", n=N, d=d, heads=H, blocks=half, direction="both")
longer = 2 * N if N <= 2048 else N // 2
there = nf.predict("flash2", n=longer, d=d, direction="both", blocks=this.blocks)
ideal_there = 11 * longer**2 + 12 * longer * d
sides = f", blocks={tuple(this.blocks)}" if this.blocks else ""
change = 2 * N * N - ((2 + Tr2) * N * d + 2 * N)             # dS stored and loaded; no Q, dO, V, L and D
this.tries({
    f"--blocks={half[0]},{half[1]}": f"""Br = {half[0]} and Bc = {half[1]} in flash2: which lines of its bill change?
    Together {then.elements:,} elements instead of {predicted2.elements:,}.""",
    f"--n {longer}": f"A training step of flash2 moves {there.elements / ideal_there:.3f} times 11N² + 12Nd then.",
})
this.text(f"""
Check yourself: a variant of flash2's backward pass stores dS, N × N, in backward_dKdV and lets backward_dQ read it. How
many products are left? How many elements does it move more, and how many less? Would the bill be smaller at N = {N},
with Tr = {Tr2} and d = {d}? Put into `spared` the tensors that backward_dQ need not read any more, and into `more` how
many elements of dS move:

    import numba_flash as nf
    bill = nf.predict("flash2", n={N}, d={d}, direction="backward"{sides})
    more, spared = ..., ["Q", ...]
    more - sum(bill.kernels["backward_dQ"][x].loads for x in spared)

That is the change of one head's bill; with the right tensors its last three digits are
{abs(change) % 1000:03}. As many
products are left as with the atomics of part 10.
""")
this.end()
