"""How kernels of large vocabularies go through logits: blocks of a row, and chunks of rows."""

# largest V, columns of a block, warps: 32 elements a thread, whose loads are all on their way
# before the first is used. On an H200 few warps a row are best for long rows too: 1.93 ms at
# 8192 x 151936 with 4, 2.00 with 8, 2.13 with 16, 2.88 with 32 and 16 elements.
TILES = ((1024, 1024, 4), (1 << 62, 4096, 4))
STAGES = 1
# Bytes of the buffer of logits: at V 32000 4096 rows, at 151936 768. Each chunk reads and writes
# all of dweight, so that a smaller buffer costs time.
CHUNK_BYTES = 1 << 28
# Rows of a tile of the products; chunks are a multiple of it.
ROW_MULTIPLE = 128


def rows_of_chunk(N: int, V: int, bytes_each: int) -> int:
    """Chunks of about equal size, as few as the buffer allows."""
    max_columns = CHUNK_BYTES // (max(V, 1) * bytes_each) // ROW_MULTIPLE * ROW_MULTIPLE
    chunks = -(-N // max(max_columns, ROW_MULTIPLE))
    return -(-N // (max(chunks, 1) * ROW_MULTIPLE)) * ROW_MULTIPLE
