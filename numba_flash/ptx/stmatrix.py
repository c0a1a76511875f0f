"""stmatrix: from the registers of a warp to tiles in shared memory. PTX ISA, "stmatrix". Compute capability 9.0."""

from .inline import instruction, u32


@instruction("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$address], {$a, $b, $c, $d};")
def stmatrix_x4(address: u32, a: u32, b: u32, c: u32, d: u32):
    """Four 8 × 8 matrices of 2-byte numbers: thread 8q + r of the warp gives the address of row r of matrix q.

    a, b, c, d: this thread's two elements of each matrix, columns 2(lane % 4) and the next of row lane // 4.
    """
