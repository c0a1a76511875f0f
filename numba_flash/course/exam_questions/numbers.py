"""Bills, tiles and operations at sizes that are drawn; every answer comes from the library."""

import math

from ... import patterns
from ...blocks import choose_blocks, tiles
from ...hbm.predict import algorithm0, flops, kept, predict
from .pool import Part, question


def ragged(rng, T, most=16):
    """A length that T does not divide."""
    return rng.randrange(3, most) * T + rng.randrange(1, T)


@question("numbers", "02, part 4", 5)
def naive_bill(rng):
    N, d = rng.choice((96, 128, 192, 256, 320)), rng.choice((16, 32, 64))
    bill = predict("naive", n=N, d=d)
    return {
        "text": f"The stage `naive`, one head, N = {N} queries and keys, d = {d}: one thread per score, one thread per "
        "row for softmax (which passes over the row three times), one thread per element of O. As the threads request "
        "them, how many elements are",
        "parts": (
            Part("loads of Q?", bill["Q"].loads),
            Part("loads of S, in all kernels?", bill["S"].loads),
            Part("loads of P?", bill["P"].loads),
            Part("all loads and stores together?", bill.elements, 2),
        ),
        "why": "Q: N² threads, d each, N²d. S: 3 passes, 3N². P: Nd threads, N each, N²d. Together 4N²d + 5N² + Nd.",
        "wrong": (
            (f"{N * d:,} for Q", "Algorithm 0's ideal: each operand read once; here every thread fetches for itself"),
            (f"{N * N:,} for P", "forgot that the d threads of a row of O all read the same row of P"),
            (f"{N * N:,} for S", "forgot that softmax needs m, l and P, each in a pass of its own"),
        ),
        "facts": {"stage": "naive", "n": N, "d": d},
    }


@question("numbers", "03, part 3", 6)
def tiled_bill(rng):
    T = rng.choice((8, 16))
    N = ragged(rng, T)
    d = rng.choice([d for d in (24, 40, 64, 72) if tiles(d, T) != tiles(N, T)])
    bill = predict("tiled", n=N, d=d, blocks=T)
    return {
        "text": f"The stage `tiled` with T = {T}, one head, N = {N} queries and keys, d = {d}. Operands come through "
        f"T × T tiles, and nothing is loaded beyond an edge. Softmax is that of `naive`. How many elements are",
        "parts": (
            Part("loads of Q?", bill["Q"].loads),
            Part("loads of P?", bill["P"].loads),
            Part("loads of V?", bill["V"].loads),
            Part("loads of S?", bill["S"].loads),
        ),
        "why": f"⌈N/T⌉ = {tiles(N, T)} and ⌈d/T⌉ = {tiles(d, T)}. Q and V: N·d·⌈N/T⌉. P: N²·⌈d/T⌉, once per column of "
        "tiles of O. S: 3N², as before: tiles do not help softmax.",
        "wrong": (
            (f"{N * N * d / T:,.10g} for Q", "N²d/T, without rounding up: T does not divide N"),
            (f"{N * N * tiles(N, T):,} for P", "took tiles along N; O has ⌈d/T⌉ columns of tiles"),
            (f"{N * N:,} for S", "thought that tiles save the passes of softmax"),
        ),
        "facts": {"stage": "tiled", "n": N, "d": d, "blocks": T},
    }


@question("numbers", "04, part 8", 5)
def online_bill(rng):
    T, d = rng.choice((8, 16)), rng.choice((24, 40, 64, 72))
    N = ragged(rng, T)
    bill = predict("online_softmax", n=N, d=d, blocks=T)
    return {
        "text": f"The stage `online_softmax` with T = {T}, one head, N = {N} queries and keys, d = {d}. `statistics` "
        "finds m and l in one pass over S; `output` forms a tile of P in shared memory where `tiled` loaded one. How "
        "many elements are",
        "parts": (
            Part("loads of S by `statistics`?", bill.kernels["statistics"]["S"].loads),
            Part("loads of S by `output`?", bill.kernels["output"]["S"].loads),
            Part("stores of P?", 0),
            Part("stores of m and l together?", bill["m"].stores + bill["l"].stores),
        ),
        "why": f"One pass is N². `output` reads S once per column of tiles of O, ⌈d/T⌉ = {tiles(d, T)} times. P stays "
        "in shared memory. m and l: one each per row.",
        "wrong": (
            (f"{3 * N * N:,} for `statistics`", "three passes: that was softmax before the online trick"),
            (f"{N * N:,} for `output`", "forgot the columns of tiles of O"),
            (f"{N * N:,} for P", "shared memory is free: what is not in HBM is not in the bill"),
        ),
        "facts": {"stage": "online_softmax", "n": N, "d": d, "blocks": T},
    }


@question("numbers", "05, part 4", 6)
def flash_bill(rng):
    d, Br, Bc = rng.choice((16, 32, 64)), rng.choice((8, 16, 32)), rng.choice((16, 24, 32))
    N = ragged(rng, Bc, 10)
    bill, Tc = predict("flash", n=N, d=d, blocks=(Br, Bc)), tiles(N, Bc)
    kernel = bill.kernels["flash"]
    return {
        "text": f"Algorithm 1 (stage `flash`), one head, N = {N} queries and keys, d = {d}, Br = {Br}, Bc = {Bc}. "
        "Leave line 2, the initialisation, out. How many",
        "parts": (
            Part("tiles of keys are there?", Tc),
            Part("elements of K are loaded?", kernel["K"].loads),
            Part("elements of Q are loaded?", kernel["Q"].loads),
            Part("elements of O are loaded and stored together?", kernel["O"].elements),
            Part("elements of l and m are loaded and stored together?", kernel["l"].elements + kernel["m"].elements),
        ),
        "why": f"Tc = ⌈N/Bc⌉ = {Tc}. K once, Nd. Q once per tile of keys, Tc·Nd. O as often, loaded and stored: "
        "2Tc·Nd. l and m: 4Tc·N. Br does not enter.",
        "wrong": (
            (f"{tiles(N, Br) * N * d:,} for K", "the other loop order: that is FlashAttention-2"),
            (f"{N * d:,} for Q", "thought that Q stays on chip while the keys pass; here keys are the outer loop"),
            (f"{Tc * N * d:,} for O", "counted loads or stores alone"),
        ),
        "facts": {"stage": "flash", "n": N, "d": d, "blocks": (Br, Bc)},
    }


@question("numbers", "05, part 7", 5)
def flash2_bill(rng):
    d, (Br, Bc) = rng.choice((16, 32, 64)), rng.sample((8, 16, 24, 32), 2)
    N = ragged(rng, Br, 10)
    bill, Tr = predict("flash2", n=N, d=d, blocks=(Br, Bc)), tiles(N, Br)
    return {
        "text": f"The stage `flash2`, one head, N = {N} queries and keys, d = {d}, Br = {Br}, Bc = {Bc}. How many",
        "parts": (
            Part("tiles of queries are there?", Tr),
            Part("elements of K are loaded?", bill["K"].loads),
            Part("elements of O are loaded and stored together?", bill["O"].elements),
            Part("elements are loaded and stored in all?", bill.elements, 2),
        ),
        "why": f"Tr = ⌈N/Br⌉ = {Tr}. K and V once per tile of queries, Tr·Nd each. Q and O once, L once: "
        "(2 + 2Tr)·Nd + N. Bc does not enter.",
        "wrong": (
            (f"{tiles(N, Bc) * N * d:,} for K", "used Bc; a tile of queries meets all keys, in tiles of any length"),
            (f"{bill.elements - N:,} in all", "forgot L, which the backward pass needs"),
        ),
        "facts": {"stage": "flash2", "n": N, "d": d, "blocks": (Br, Bc)},
    }


@question("numbers", "05, part 6", 5)
def tile_moves(rng):
    Tr, Tc = rng.randrange(3, 9), rng.randrange(3, 9)
    return {
        "text": f"Q and O are cut into Tr = {Tr} tiles, K and V into Tc = {Tc}. l, m and L are left out, and so is the "
        "initialisation. How many tiles of Q, K, V and O move between HBM and the chip, loads and stores together,",
        "parts": (
            Part("in Algorithm 1, K and V in the outer loop?", 3 * Tr * Tc + 2 * Tc, 2),
            Part("with the loops exchanged, Q in the outer loop?", 2 * Tr * Tc + 2 * Tr, 2),
        ),
        "why": "Algorithm 1: K and V once, 2Tc; at each of TrTc steps Q in, O in, O out, 3TrTc. Exchanged: Q and O "
        "once, 2Tr; at each step K and V in, 2TrTc.",
        "wrong": (
            (f"{2 * Tr * Tc + 2 * Tc:,} for Algorithm 1", "forgot that O is read before it is rescaled"),
            (
                f"{3 * Tr * Tc + Tr:,} with Q outside",
                "stored O at each step; it stays in registers until the last key",
            ),
        ),
        "facts": {"Tr": Tr, "Tc": Tc},
    }


@question("numbers", "05, part 3", 6)
def tiles_that_fit(rng):
    d, sram = rng.choice((32, 48, 64, 80, 96)), 1024 * rng.choice((32, 48, 64, 96))
    Bc = choose_blocks("flash", d=d, sram=sram).Bc
    paper = choose_blocks("flash", d=d, sram=sram, rule="paper")
    needs = 4 * (2 * paper.Bc * d + 2 * paper.Br * d + paper.Br * paper.Bc)
    return {
        "text": f"A block has {sram:,} bytes of shared memory. Elements are float32, d = {d}. Our `flash` keeps K_j "
        "and V_j (Bc × d each) and S_ij (Br × Bc) there, with Br = 64; Q_i and O_i are in registers. Line 1 of "
        "Algorithm 1 sets Bc = ⌈M/4d⌉ and Br = min(Bc, d), with M the number of elements.",
        "parts": (
            Part("What is the largest Bc that fits our kernel?", Bc, 2),
            Part("What is Bc by line 1?", paper.Bc),
            Part(
                "How many bytes would K_j, V_j, Q_i, O_i and S_ij take with the Bc and Br of line 1, all in shared "
                "memory?",
                needs,
                2,
            ),
        ),
        "why": f"M = {sram // 4:,}. Bc·(2d + 64) ≤ M gives {Bc}. By line 1, Bc = {paper.Bc} and Br = {paper.Br}: "
        f"4·(2·Bc·d + 2·Br·d + Br·Bc) = {needs:,} bytes, {'more than' if needs > sram else 'within'} what there is. "
        "Line 1 leaves S_ij out.",
        "wrong": (
            (f"{sram // 4 // (2 * d):,} for Bc", "forgot S_ij"),
            (f"{tiles(sram, 4 * d):,} by line 1", "put bytes for M; M counts elements"),
        ),
        "facts": {"d": d, "sram": sram},
    }


@question("numbers", "06, part 7", 6)
def when_flash_loses(rng):
    d, kib, N = rng.choice((32, 64, 96, 128)), rng.choice((16, 48, 96, 160)), rng.choice((512, 1024, 2048))
    Bc = choose_blocks("flash", d=d, sram=1024 * kib).Bc
    bill, ideal = predict("flash", n=N, d=d, sram=1024 * kib), algorithm0(n=N, d=d)
    return {
        "text": f"With {kib} KiB of shared memory and d = {d} (float32), `flash` has tiles of Br = 64 queries and Bc = "
        f"{Bc} keys. One head, N = {N:,}. Its kernel moves (2 + 3Tc)Nd + 4TcN elements, and its initialisation Nd + "
        "2N. How many elements does",
        "parts": (
            Part("`flash` move, initialisation included?", bill.elements, 2),
            Part("Algorithm 0 move, each operand of a step read once?", ideal.elements),
            Part("Does `flash` move fewer (yes or no)?", "yes" if bill.elements < ideal.elements else "no"),
        ),
        "open": ((2, "which quantities decide, for N large: d² against M, the elements on chip; N cancels"),),
        "also": "Which quantities decide this for a long sequence, and how?",
        "why": f"Tc = {tiles(N, Bc)}. About 3N²d/Bc against 4N², and Bc is about M/(2d + 64): so d·(2d + 64) against "
        f"M, for large d d² against M. Here the quotient is {bill.elements / ideal.elements:.2f}.",
        "wrong": (
            ("N decides", "both grow like N²; a longer sequence does not turn a loss into a gain"),
            ("flash always wins", "Theorem 2 has d²/M as a factor of N²: it may exceed 1"),
        ),
        "facts": {"n": N, "d": d, "sram": 1024 * kib, "blocks": (64, Bc)},
    }


@question("numbers", "08, part 5", 5)
def causal_keys(rng):
    Br, Tr, d = rng.choice((16, 32, 64)), rng.randrange(4, 9), rng.choice((16, 32, 64))
    N = Br * Tr
    causal, dense = (predict("flash2", n=N, d=d, blocks=(Br, 16), causal=c)["K"].loads for c in (True, False))
    return {
        "text": f"The stage `flash2` in causal order, one head, N = {N} queries and keys, d = {d}, Br = {Br}. A tile "
        "of queries stops at the last key that its last query sees.",
        "parts": (
            Part("How many elements of K are loaded?", causal, 2),
            Part("How many times that without a mask, as a decimal?", causal / dense, 1),
            Part("By which factor does the mask lower the loads of S in `naive`?", 1),
        ),
        "why": f"Tile i sees (i+1)·Br keys: Br·Tr·(Tr+1)/2 = {causal // d:,} rows of K, (Tr+1)/(2Tr) of Tr·N. In naive "
        "a mask is a value in S: it saves no traffic, and the factor is 1.",
        "wrong": (
            ("0.5", "half of the scores are hidden, but the tiles on the diagonal are loaded whole"),
            ("a factor of 2 for naive", "took hidden scores for work left out"),
        ),
        "facts": {"stage": "flash2", "n": N, "d": d, "blocks": (Br, 16), "causal": True},
    }


@question("numbers", "07, part 9", 4)
def kept_between(rng):
    N, heads, batch = 1024 * rng.choice((2, 4, 8, 16, 32)), rng.choice((8, 12, 16)), rng.choice((1, 4, 16))
    P, L = (sum(kept(stage, n=N, heads=heads, batch=batch).values()) for stage in ("naive", "flash2"))
    return {
        "text": f"Batch {batch}, {heads} heads, N = {N:,}. Elements have 2 bytes, those of L 4 (float32). Between "
        "forward and backward pass a stage keeps Q, K, V, O, and more. How many bytes more does",
        "parts": (Part("`naive` keep?", 2 * P, 2), Part("`flash2` keep?", 4 * L, 2)),
        "open": ((1, "what `flash2` does in the backward pass with what it kept: P = exp(S − L), S from Q and K"),),
        "also": "What does `flash2` do in the backward pass with what it kept?",
        "why": "naive keeps P, N² elements of 2 bytes per head; flash2 keeps L, N of 4 bytes per head. The quotient is "
        "N/2. L stands in an exponent, where its rounding error becomes a relative error of P: hence float32.",
        "wrong": (
            (f"{4 * P:,} for naive", "kept S too; the gradients need P alone"),
            ("0 for flash2", "forgot L, without which P cannot be formed in one go"),
            (f"{2 * L:,} for flash2", "took L in half precision"),
        ),
        "facts": {"n": N, "heads": heads, "batch": batch},
    }


@question("numbers", "07, part 5", 6)
def backward_bill(rng):
    d, Bc = rng.choice((16, 32, 64)), rng.choice((16, 32))
    N = Bc * rng.randrange(3, 9)
    bill = predict("flash", n=N, d=d, blocks=(8, Bc), direction="both")
    kernel, ideal = bill.kernels["flash_backward"], algorithm0(n=N, d=d, direction="backward")
    return {
        "text": f"The backward pass, one head, N = {N} queries and keys, d = {d}. Algorithm 4 with Bc = {Bc} goes "
        "through tiles of keys in the outer loop. How many",
        "parts": (
            Part("elements of Q, O and dO does it load together?", sum(kernel[x].loads for x in ("Q", "O", "dO"))),
            Part("elements of dQ does its main kernel load and store together?", kernel["dQ"].elements),
            Part("elements does Algorithm 3 move in all, each operand of its five steps read once?", ideal.elements),
            Part("matrix products (of 2N²d operations) has Algorithm 3?", 4),
            Part("matrix products has Algorithm 4?", 5),
        ),
        "why": f"Tc = {tiles(N, Bc)}: Q, O, dO pass once per tile of keys, 3Tc·Nd; dQ is loaded and stored each time, "
        "2Tc·Nd. Algorithm 3: 7N² + 8Nd (P and dS read twice). Products: dV, dP, dQ, dK; Algorithm 4 also S.",
        "wrong": (
            ("4 products in Algorithm 4", "forgot that S is computed again"),
            (f"{2 * N * d:,} for dQ", "dQ is a sum over all tiles of keys, and they are the outer loop"),
        ),
        "facts": {"n": N, "d": d, "Bc": Bc},
    }


@question("numbers", "07, part 8", 5)
def training_products(rng):
    N, d = 512 * rng.randrange(2, 9), rng.choice((64, 96, 128))
    measured = flops("flash", n=N, d=d, direction="both") / flops("naive", n=N, d=d, direction="both")
    return {
        "text": f"A training step, forward and backward, one head, N = {N:,}, d = {d}. Count matrix products of 2N²d "
        "operations each, and nothing else. How many are there",
        "parts": (
            Part("in standard attention, which keeps P?", 6),
            Part("in `flash` (Algorithms 1 and 4)?", 7),
            Part("in our `flash2`, where two kernels own dK, dV and dQ?", 9),
            Part("How many operations is one product?", 2 * N * N * d),
        ),
        "open": ((1, "why it is faster all the same: the step waits for memory, and moves far fewer bytes"),),
        "also": "Why can `flash` be faster all the same?",
        "why": "Forward 2. Backward dV, dP, dQ, dK: 4. flash computes S again: 5. flash2: S and dP in both kernels, 4 "
        f"+ 3. All operations counted, flash has {measured:.2f} times those of naive (7/6 = 1.17).",
        "wrong": (
            ("6 for flash", "recomputation is not free: S is a product"),
            ("7 for flash2", "that is the variant with atomics; owners compute S and dP twice"),
        ),
        "facts": {"n": N, "d": d, "ratio": measured},
    }


@question("numbers", "01, parts 3 and 5", 5)
def intensity(rng):
    d, times, size = rng.choice((32, 64, 128)), rng.choice((1, 3, 7, 15, 31)), rng.choice((2, 4))
    N = d * times
    ideal = algorithm0(n=N, d=d)
    matrices = ideal["S"].elements + ideal["P"].elements
    return {
        "text": f"Algorithm 0, one head, N = {N:,} queries and keys, d = {d}, elements of {size} bytes. Softmax takes "
        "7 operations per score.",
        "parts": (
            Part("How many elements does Algorithm 0 move?", ideal.elements),
            Part("Which share of them are of S and P, as a decimal?", matrices / ideal.elements),
            Part("How many operations per byte has the softmax step?", 7 / (2 * size)),
            Part("How many operations per byte has it with twice the d?", 7 / (2 * size)),
        ),
        "why": "4N² + 4Nd elements, 4N² of S and P: N/(N + d). Softmax reads a score and writes a weight: 7 operations "
        f"for {2 * size} bytes. d does not enter.",
        "wrong": (
            (f"{7 / size:g} operations per byte", "forgot that P is written"),
            ("another number with twice the d", "took softmax for a product"),
        ),
        "facts": {"n": N, "d": d, "itemsize": size},
    }


@question("numbers", "11, parts 2, 5 and 7", 6)
def decoding(rng):
    d, n, Bc = rng.choice((64, 128)), rng.choice((4, 8, 16)), rng.choice((16, 32, 64))
    N_k = Bc * (n * rng.randrange(3, 9) + rng.randrange(1, n))
    whole = predict("flash2", n=1, n_k=N_k, d=d).elements
    split = predict("flash2", n=1, n_k=N_k, d=d, split_kv=n, blocks=(1, Bc)).elements
    return {
        "text": f"Decoding: one query, N_k = {N_k:,} keys, one head, d = {d}, float32. How many",
        "parts": (
            Part("elements does `flash2` move?", whole, 2),
            Part(f"elements more does it move with n = {n} splits, 6nd + 2n - d?", split - whole),
            Part(f"tiles of Bc = {Bc} keys does the longest chain have then?", tiles(tiles(N_k, Bc), n)),
            Part("operations of the two products are there per byte of K and V?", 0.5),
        ),
        "open": ((1, "what the splits are for: they give more multiprocessors work; the traffic does not fall"),),
        "also": "What are the splits for?",
        "why": f"K and V once, Q, O and L: 2N_k·d + 2d + 1. Tc = {tiles(N_k, Bc)} tiles in {n} splits: ⌈Tc/n⌉. An "
        "element takes part in a product and a sum, 2 operations for 4 bytes.",
        "wrong": (
            ("fewer elements with splits", "took parallel work for less traffic"),
            ("1 operation per byte", "that is for elements of 2 bytes"),
        ),
        "facts": {"n_k": N_k, "d": d, "splits": n, "Bc": Bc},
    }


@question("numbers", "09, parts 6 and 8", 4)
def dropout_bytes(rng):
    N, d = 128 * rng.randrange(2, 9), rng.choice((32, 64))
    step = {"n": N, "d": d, "direction": "both"}
    more = [predict(s, **step, dropout_p=0.1).total_bytes - predict(s, **step).total_bytes for s in ("naive", "flash2")]
    return {
        "text": f"A training step with dropout, one head, N = {N} queries and keys, d = {d}, float32; an element of Z "
        "takes one byte. In `naive` one kernel loads P and stores Z and Z∘P, and in the backward pass another loads Z "
        "and dP and stores dP. How many bytes does dropout add",
        "parts": (Part("in `naive`?", more[0], 2), Part("in `flash2`?", more[1])),
        "open": ((1, "where `flash2` has Z from: drawn again from the seed and the place of the score"),),
        "also": "Where does `flash2` have Z from in the backward pass?",
        "why": "Two accesses to Z and four to floats, 18 bytes per score, 18N². flash2 draws Z again, from a "
        "generator whose counter is (i, j, head): nothing is stored.",
        "wrong": (
            (f"{24 * N * N:,}", "gave Z elements of 4 bytes"),
            (f"{3 * N * N:,} for flash2", "stored Z, and loaded it in both kernels of the backward pass"),
        ),
        "facts": {"n": N, "d": d},
    }


@question("numbers", "10, part 4", 5)
def local_pattern(rng):
    side, Tr, d = rng.choice((16, 32)), rng.randrange(4, 11), rng.choice((16, 32, 64))
    N = side * Tr
    mask = patterns.local(N, N, (side, side))
    bill = predict("flash2", n=N, d=d, blocks=(side, side), block_mask=mask)
    return {
        "text": f"Block-sparse `flash2`, one head, N = {N} queries and keys, d = {d}, tiles of {side} × {side}, "
        f"pattern `local`: each tile of queries sees its own place and one more on each side. Each of the {side} "
        "threads of a block reads the byte of the mask for each tile of keys. How many",
        "parts": (
            Part("tiles are computed?", int(mask.sum())),
            Part("elements of K are loaded?", bill["K"].loads),
            Part("bytes of the mask are loaded?", bill["block_mask"].loads),
        ),
        "open": ((1, "this is another function than dense attention: hidden keys have no weight"),),
        "also": "Is this the same function as dense attention? Why?",
        "why": f"3Tr - 2 = {mask.sum()} tiles of {side} keys. Tr·{side} threads ask Tc times: N·N/{side} bytes.",
        "wrong": (
            (f"{3 * Tr} tiles", "the first and the last place have one neighbour alone"),
            (f"{Tr * Tr} bytes", "counted one thread per block; all of them ask"),
        ),
        "facts": {"n": N, "d": d, "side": side},
    }


@question("numbers", "12, parts 2, 3 and 5", 5)
def a_warp_asks(rng):
    s, width, (R, C) = rng.choice((2, 3, 5, 6)), rng.choice((42, 44, 50, 52, 56, 72, 80)), rng.sample((2, 4, 8), 2)
    return {
        "text": "float32; a warp of 32 threads, a sector of 32 bytes, 32 banks of 4 bytes. Thread i of a warp loads "
        f"X[{s}·i] from HBM, where X begins with a sector. Then it reads tile[i, 0] of a tile in shared memory whose "
        f"rows have {width} elements. Then it multiplies, in registers, {R} rows by {C} columns.",
        "parts": (
            Part("How many sectors does the load from HBM touch?", 4 * s),
            Part("How many wavefronts does the read from shared memory take?", math.gcd(width, 32), 2),
            Part("How many words does it load from shared memory per product, as a decimal?", (R + C) / (R * C)),
        ),
        "open": ((1, "fewer loads per product, or sums that do not wait for one another, or more warps at work"),),
        "also": "On an H200, flash2 and register_tiled keep shared memory equally busy, 62 and 63 % of the time, and "
        "no unit is at its limit. Yet register_tiled is faster. Name a reason.",
        "why": f"Neighbours lie {4 * s} bytes apart: 32·{4 * s}/32 sectors, none left out. Rows begin {width} banks "
        f"apart: gcd({width}, 32) rows share a bank. {R} + {C} words serve {R}·{C} products.",
        "wrong": (
            ("4 sectors", "took the elements for neighbours"),
            ("1 wavefront", "thought that only equal words collide; different rows can begin in one bank"),
            ("2 words per product", "loaded both factors of each product anew"),
        ),
        "facts": {"s": s, "width": width, "R": R, "C": C},
    }


@question("numbers", "13, parts 5 and 7", 6)
def what_dram_moves(rng):
    N, d, heads = 256 * rng.randrange(2, 9), rng.choice((32, 64)), rng.choice((2, 8, 32, 128, 512))
    scores, one = 4 * heads * N * N, 4 * heads * N * d
    return {
        "text": f"Forward, {heads} heads, N = {N:,} queries and keys, d = {d}, float32, on a GPU whose L2 holds 60 MiB "
        "(62,914,560 bytes). A profiler empties the caches before each kernel.",
        "parts": (
            Part("How many bytes is S of all heads?", scores),
            Part(
                "Can the softmax of `naive` find S in L2 in a run without the profiler (yes or no)?",
                "yes" if scores <= 60 * 2**20 else "no",
            ),
            Part(
                "How many bytes must DRAM move at least for `scores` of `naive`, what is stored included?",
                2 * one + scores,
                2,
            ),
            Part("How many bytes must DRAM read at least for `flash2`?", 3 * one),
        ),
        "open": ((2, "L2 answers what is read again; what is stored may lie in L2 still when the kernel ends"),),
        "also": "The threads of `naive` ask for far more than that. Why need DRAM not move it? And why can a profiler "
        "see fewer bytes written than a kernel stored?",
        "why": "S has 4N² bytes per head. Each tensor that is loaded has to come once, and each that is stored has to "
        "go once: Q, K and S for `scores`; flash2 reads Q, K and V.",
        "wrong": (
            (f"{heads * N * N:,} for S", "counted elements; each has 4 bytes"),
            (
                f"{predict('naive', n=N, d=d, heads=heads).kernels['scores']['Q'].loads * 8 + scores:,} for `scores`",
                "gave the bytes that the threads request; caches answer nearly all loads",
            ),
            (f"{2 * one:,} for flash2", "left a tensor out: Q, K and V"),
        ),
        "facts": {"n": N, "d": d, "heads": heads},
    }
