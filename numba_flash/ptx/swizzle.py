"""Where an element of a tile lies in shared memory.

Shared memory has 32 banks of 4 bytes, and serves 128 bytes at a time if each is in another bank. `ldmatrix` reads 16
bytes (a chunk: 8 elements of 2 bytes) from each of 8 rows. Rows of 128 or 256 bytes one after another would all begin
in bank 0. So chunk c of row r is stored where chunk c XOR (r mod 8) would be: the same chunk of 8 rows that follow one
another lies in 8 different places of 128 bytes.
"""

CHUNK = 16  # bytes that are moved at once: 8 elements of 2 bytes


def place(row, chunk, row_bytes):
    """Bytes from the start of the tile to a chunk; row_bytes: 128 or a multiple. Kernels and NumPy arrays alike."""
    return row * row_bytes + (chunk ^ (row & 7)) * 16
