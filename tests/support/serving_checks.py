"""The engines' calls by slipstream.integrations beside their recurrences, on the default device."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.integrations import sglang, vllm
from tests.support.serving_calls import HV, Call, K, N, T, V

KERNELS = {False: sglang.GDNKernel(), True: sglang.KDAKernel()}


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=2e-5, rtol=2e-5)


def expect_states(call: Call, states: list[list[Tensor]], before: Tensor) -> None:
    """The last state in each slot, and other slots as they were."""
    want = before.clone().double()
    for n, slot in enumerate(call.slots.tolist()):
        if slot != call.null:
            want[slot] = states[n][-1]
    near(call.states, want)


def sglang_decode(is_kda: bool) -> None:
    for packed_call in (False, True):
        call = Call.decode(is_kda)
        (want, states), before = call.expected(), call.states.clone()
        given = call.sglang()
        if packed_call:
            q, k, v = (given.pop(n)[0].flatten(1) for n in ("q", "k", "v"))
            given.pop("query_start_loc")
            sizes = {"num_v_heads": HV, "head_v_dim": V, "scale": K**-0.5}
            got = KERNELS[is_kda].packed_decode(torch.cat([q, k, v], -1), **given, **sizes)
        else:
            got = KERNELS[is_kda].decode(**given)
        valid = call.valid_rows(N)
        near(got[:, valid], want[:, valid])
        expect_states(call, states, before)


def sglang_verify(is_kda: bool) -> None:
    call = Call.verify(is_kda)
    (want, states), before = call.expected(), call.states.clone()
    got = KERNELS[is_kda].target_verify(**call.sglang(), **call.sglang_verify())
    near(got, want)
    assert torch.equal(call.states, before) and call.buffer is not None and call.rows is not None
    for n, row in enumerate(call.rows.tolist()):
        near(call.buffer[row], torch.stack(states[n][1:]))
    tree = {**call.sglang_verify(), "retrieve_parent_token": torch.zeros(N, T)}
    with pytest.raises(NotImplementedError, match=r"^retrieve_parent_token: "):
        KERNELS[is_kda].target_verify(**call.sglang(), **tree)


def sglang_verify_of_fewer_drafts(is_kda: bool) -> None:
    """Sequences of one to T drafts, and tokens past the last: their states and others stay."""
    call = Call.make([2, T, 1, 2], torch.tensor([5, 1, 2], dtype=torch.int32), is_kda)
    call.offsets = call.offsets[:-1]
    call.buffer, call.rows = torch.zeros(N + 1, T, HV, V, K), torch.tensor([2, 0, 1])
    want, states = call.expected()
    got = KERNELS[is_kda].target_verify(**call.sglang(), **call.sglang_verify(), stable_rows=True)
    assert got.shape == call.v.shape
    near(got[:, :-2], want)
    left = torch.zeros_like(call.buffer).double()
    for n, row in enumerate(call.rows.tolist()):
        left[row, : len(states[n]) - 1] = torch.stack(states[n][1:])
    near(call.buffer, left)


def sglang_states_before_chunks(is_kda: bool) -> None:
    """What SGLang 0.5.16 reads: [1, chunks, HV, V, K], sequence by sequence."""
    call = Call.prefill(is_kda)
    (want, states), before = call.expected(), call.states.clone()
    options = {"return_intermediate_states": True} if is_kda else {}
    found: Any = KERNELS[is_kda].extend(**call.sglang_prefill(), **options)
    near(found[0], want)
    # of 70, 5 and 64 tokens
    near(found[-1][0, :4], torch.stack([states[0][0], states[0][64], states[1][0], states[2][0]]))
    expect_states(call, states, before)
    if is_kda:  # of a later release, which says that it reads none
        options["track_ssm_h_src"] = torch.zeros(0)
        assert KERNELS[True].extend(**call.sglang_prefill(), **options)[1] is None


def vllm_decode(is_kda: bool) -> None:
    call = Call.decode(is_kda, 1)
    (want, states), before = call.expected(), call.states.clone()
    got, pool = vllm.delta_rule_update(**call.vllm(), is_kda=is_kda)
    near(got[:, call.valid_rows(N)], want[:, call.valid_rows(N)])
    assert pool is call.states
    expect_states(call, states, before)


def vllm_verify(is_kda: bool) -> None:
    call = Call.drafts(is_kda)
    want, states = call.expected()
    got, pool = vllm.delta_rule_update(**call.vllm(), is_kda=is_kda)
    near(got, want)
    for n, blocks in enumerate(call.slots.tolist()):
        for t, state in enumerate(states[n][1:]):
            near(pool[blocks[t]], state)


def sglang_snapshots(is_kda: bool, dtype: torch.dtype) -> None:
    """The state before a chunk of 64 tokens of each sequence, whose pool may be in 16 bits."""
    call = Call.prefill(is_kda)
    call.states = call.states.to(dtype)
    want, states = call.expected()
    track, chunks = torch.full((N, HV, V, K), 7.0), torch.tensor([1, 0, -1], dtype=torch.int32)
    given = {"track_state": track, "track_chunk_idx": chunks}
    if is_kda:
        given |= {"return_intermediate_states": True, "track_ssm_h_src": torch.tensor([1])}
    found: Any = KERNELS[is_kda].extend(**call.sglang_prefill(), **given)
    near(found[0], want)
    assert found[-1] is None
    near(track[0], states[0][64])
    near(track[1], states[1][0])
    assert bool((track[2] == 7).all())


CHECKS = (
    sglang_decode,
    sglang_verify,
    sglang_verify_of_fewer_drafts,
    sglang_states_before_chunks,
    vllm_decode,
    vllm_verify,
)
