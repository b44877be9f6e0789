"""fla.ops.utils: offsets and indices of packed sequences, padding, sums of chunks."""

from slipstream.compat.fla.ops.utils.cumsum import (
    chunk_global_cumsum,
    chunk_global_cumsum_scalar,
    chunk_global_cumsum_vector,
    chunk_local_cumsum,
    chunk_local_cumsum_scalar,
    chunk_local_cumsum_vector,
)
from slipstream.compat.fla.ops.utils.index import (
    get_max_num_splits,
    prepare_chunk_indices,
    prepare_chunk_indices_static,
    prepare_chunk_offsets,
    prepare_cu_seqlens_from_lens,
    prepare_cu_seqlens_from_mask,
    prepare_lens,
    prepare_lens_from_mask,
    prepare_position_ids,
    prepare_sequence_ids,
    prepare_split_cu_seqlens,
    prepare_token_indices,
)
from slipstream.compat.fla.ops.utils.pack import pack_sequence, unpack_sequence
from slipstream.compat.fla.ops.utils.pooling import mean_pooling

__all__ = [
    "chunk_global_cumsum",
    "chunk_global_cumsum_scalar",
    "chunk_global_cumsum_vector",
    "chunk_local_cumsum",
    "chunk_local_cumsum_scalar",
    "chunk_local_cumsum_vector",
    "get_max_num_splits",
    "mean_pooling",
    "pack_sequence",
    "prepare_chunk_indices",
    "prepare_chunk_indices_static",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_lens",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_split_cu_seqlens",
    "prepare_token_indices",
    "unpack_sequence",
]
