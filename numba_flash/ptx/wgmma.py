"""wgmma: the tensor cores of Hopper, driven by a warp group of 128 threads (sm_90a).

PTX ISA manual, "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async". One instruction adds a product of
64 × 16 and 16 × n to 64 × n sums. B lies in shared memory, A there too or in registers; the sums are float32 in
registers. Thread t of the group, lane t % 32 of warp w = t // 32, holds two rows, r = 16w + lane // 4 and r + 8, and of
every 8 columns two: sums[4c + 2k + e] is row r + 8k, column 8c + 2(lane % 4) + e. A in registers has the same layout,
two neighbours packed in one word.

The instructions run asynchronously. The accumulators belong to them from the fence that a product begins with to the
wait; both take the accumulators as operands in and out, so that neither compiler moves an access across.
"""

from functools import cache

from .inline import f32, instruction, reads, u32, u64, updates

SWIZZLE_128 = 1 << 62  # the layout of a tile in shared memory: PTX ISA manual, "Matrix Descriptor Format", bits 62-63


def descriptor(panel=0):
    """The constant bits of the descriptor of an operand in shared memory; `| address >> 4` names the tile.

    The operand consists of panels of 64 columns: rows of 128 bytes, with their eight 16-byte pieces permuted as
    TMA does it; the panel begins at a multiple of 1024 bytes. 8 rows are 1024 bytes, the stride.
    panel: bytes from one panel to the next, for an operand whose rows are those of the sum (`transposed`).
    """
    leading = panel >> 4 if panel else 1
    return SWIZZLE_128 | 1024 >> 4 << 32 | leading << 16


@cache
def make_product(n, dtype, steps_a, steps_b, transposed=False, clear=False):
    """product(sums, A, B): issue sums (64 × n) += A (64 × 16 steps) B (16 steps × n), and commit it as one group.

    wgmma.fence; for each step wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16 (or bf16); wgmma.commit_group.
    sums: local float32 array of n / 2. A: a descriptor or, where steps_a is None, a local uint32 array, 4 words a step.
    B: a descriptor. steps_a, steps_b: where each step's 16 columns begin, bytes from the start of the operand.
    dtype: "f16" or "bf16". transposed: whether B is stored as rows of the sum's columns (V as it is) rather than as
    columns of them (K as it is). clear: the sums are overwritten instead of added to.
    """
    count, steps = n // 2, len(steps_b)
    text = [f"{{ .reg .b64 a, b; .reg .pred add; setp.ne.b32 add, {int(not clear)}, 0; wgmma.fence.sync.aligned;"]
    for k in range(steps):
        if steps_a:
            text.append(f"add.s64 a, $A, {steps_a[k] >> 4};")
            a, transposes = "a", f"0, {int(transposed)}"
        else:
            a, transposes = "{" + ", ".join(f"${2 * count + 4 * k + i}" for i in range(4)) + "}", int(transposed)
        text.append(f"add.s64 b, $B, {steps_b[k] >> 4};")
        shape = f"m64n{n}k16.f32.{dtype}.{dtype}"
        text.append(f"wgmma.mma_async.sync.aligned.{shape} $sums, {a}, b, add, 1, 1, {transposes};")
        if clear and k == 0:
            text.append("setp.ne.b32 add, 1, 0;")
    text.append("wgmma.commit_group.sync.aligned; }")

    @instruction(" ".join(text))
    def product(sums: updates(f32, count), A: u64 if steps_a else reads(u32, 4 * steps), B: u64):
        """See make_product. A's words follow the sums, which are operands twice: in and out."""

    return product


@cache
def make_wait(count, pending):
    @instruction(f"wgmma.wait_group.sync.aligned {pending};")
    def wait(sums: updates(f32, count)):
        """Until at most `pending` groups are running; `sums`, `count` of them, may then be used if theirs is over."""

    return wait


@cache
def make_wait_after(count, pending):
    @instruction(
        "{ .reg .pred negative; .reg .f32 least; min.f32 least, $x, $y; setp.lt.f32 negative, least, 0f00000000; "
        f"@negative trap; wgmma.wait_group.sync.aligned {pending}; }}"
    )
    def wait(sums: updates(f32, count), x: f32, y: f32):
        """`make_wait`, but not before x and y, which are never negative, are known.

        ptxas moves a plain wait up, to before the softmax that is to run under the product; it does not move one over a
        trap that depends on the softmax's results and that is never taken.
        """

    return wait
