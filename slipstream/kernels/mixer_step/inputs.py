"""The inputs of a mixer's step: its tensors, its options, and counters of a pool's slots.

By the counters the programs of one step find out who is last. They are 0 between launches. They lie
beside the pool, for as long as that is there: a graph that was captured with a pool counts on both.
Steps on one pool never run at the same time, so neither do those on its counters.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slipstream.runtime.backends import sm90_unsupported
from slipstream.runtime.guarded_launch import is_capturing


class StepInputs(NamedTuple):
    """Tensors of one call; what is None takes no part.

    q, k: [B, T, H, K]. v, z: [B, T, HV, V]. state: [slots, HV, K, V], or [slots, HV, V, K].
    state_indices, num_accepted: [B]. conv_state: [slots, C, W or W - 1]. conv_weight: [C, W].
    conv_bias: [C].
    g: [B, T, HV] or [B, T, HV, K]. A_log, D: [HV]. dt_bias: [HV] or [HV, K]. beta: [B, T, HV].
    write: [B, T, HV, V], beside which beta is [B, T, HV, K].
    norm_weight: [V] or [HV, V].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor
    state_indices: Tensor | None
    num_accepted: Tensor | None
    conv_state: Tensor | None
    conv_weight: Tensor | None
    conv_bias: Tensor | None
    g: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    beta: Tensor | None
    write: Tensor | None
    D: Tensor | None
    z: Tensor | None
    norm_weight: Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, T, H, HV, K, V."""
        B, T, H, K = self.q.shape
        return B, T, H, self.v.shape[2], K, self.v.shape[3]

    def pool(self, v_first: bool) -> Tensor:
        """state as [slots, HV, K, V], the same memory."""
        return self.state.mT if v_first else self.state

    @property
    def channels(self) -> int:
        """C, of the convolution."""
        _, _, H, HV, K, V = self.sizes
        return 2 * H * K + HV * V

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


class StepOptions(NamedTuple):
    """As slipstream.ops.mixer_step has them.

    pending: how many of the first tokens are the last call's. channel_order: "qkv" or "vkq".
    a_is_rate: A_log has -exp(A_log). norm_eps: None is no norm. norm_group_size: channels that are
    normalised together.
    """

    scale: float
    pending: int
    state_v_first: bool
    channel_order: str
    conv_silu: bool
    a_is_rate: bool
    lower_bound: float | None
    gate_logit_normalizer: float | None
    dt_min: float
    dt_max: float
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    qk_l2norm: bool
    dt_scales_v: bool
    norm_eps: float | None
    norm_group_size: int
    norm_before_gate: bool
    z_silu: bool


def channel_offsets(inputs: StepInputs, order: str) -> tuple[int, int, int]:
    """Where the channels of q, k and v begin among those of the convolution."""
    _, _, H, HV, K, V = inputs.sizes
    keys, values = H * K, HV * V
    return (0, keys, 2 * keys) if order == "qkv" else (values + keys, values, 0)


MAX_TAPS = 8  # of a convolution that is part of a step
UNIT_EPS = 1e-6  # of ops.l2_norm


class TokenInputs(NamedTuple):
    """One token of each row. x: [N, C], C = 2 H K + HV V, before the convolution of weight [C, W]
    and bias [C]. g: [N, HV] or [N, HV, K], before its activation. A_log: [HV]. dt_bias: as g's
    last. beta: [N, HV], before its sigmoid, and whether that is doubled. counts: int64 [N], the
    place in its block. lower_bound: of g, or None."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    g: Tensor
    A_log: Tensor
    dt_bias: Tensor | None
    beta: Tensor
    counts: Tensor
    silu: bool
    doubled: bool
    lower_bound: float | None


class Blocks(NamedTuple):
    """Tensors that are written into. window: [N, W, C], the tokens before. q, k: [N, T, H, K]. v:
    [N, T, HV, V]. g: [N, T, HV] or [N, T, HV, K], float32. beta: [N, T, HV]. All are
    contiguous."""

    window: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


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


DRAFT_WIDTHS = (64, 128)
DRAFT_ROWS = 16  # keys of all tokens, and queries of new ones


def drafts_on_sm90(inputs: StepInputs, options: StepOptions) -> bool:
    """Whether the kernel takes these drafts: in 16 bits, as float32 keeps the bits of a step."""
    _, T, _, _, K, V = inputs.sizes
    return (
        inputs.num_accepted is not None
        and 0 < options.pending < T
        and 2 * T - options.pending <= DRAFT_ROWS
        and inputs.q.dtype != torch.float32
        and (inputs.g is None or inputs.g.dim() == 3)
        and inputs.write is None
        and inputs.D is None
        and not options.dt_scales_v
        and K in DRAFT_WIDTHS
        and V in DRAFT_WIDTHS
        and options.norm_group_size == V
        and sm90_unsupported(inputs.q) is None
    )
