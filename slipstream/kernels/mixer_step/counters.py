"""Counters of a pool's slots, by which the programs of one step find out who is last.

They are 0 between launches. They lie beside the pool, for as long as that is there: a graph that
was captured with a pool counts on both. Steps on one pool never run at the same time, so neither
do those on its counters.
"""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slipstream.runtime.guarded_launch import is_capturing

_of_pool: dict[tuple, tuple[StorageWeakRef, Tensor]] = {}


def counters_of(pool: Tensor, each: int) -> Tensor:
    """Int32 [slots, each], zeros: the same tensor for the same pool."""
    size, device = (pool.shape[0], each), pool.device
    if type(pool) is not Tensor:  # traced: there is no memory
        return torch.zeros(size, dtype=torch.int32, device=device)
    storage = pool.untyped_storage()
    key = (storage._cdata, pool.storage_offset(), size)
    known = _of_pool.get(key)
    if known is not None and not known[0].expired():
        return known[1]
    with torch.inference_mode(False):  # it outlives the caller's
        counters = torch.zeros(size, dtype=torch.int32, device=device)
    if not is_capturing(device):  # a graph's own memory is 0 only once the graph has begun
        if len(_of_pool) >= 256:  # some may be of freed pools
            for old in [key for key, (ref, _) in _of_pool.items() if ref.expired()]:
                del _of_pool[old]
        _of_pool[key] = StorageWeakRef(storage), counters
    return counters
