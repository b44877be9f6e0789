"""The sm_90 attention kernels on a GPU, against the float64 reference and in a CUDA graph."""

import pytest
import torch

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.sm90.plan import unsupported_reason
from tests.support.attention_calls import Call, check, got, incoming, want

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CALLS = [
    Call("full", B=2, T=333, S=517, H=2, HKV=2),
    Call("causal", B=2, T=700, S=700, H=4, HKV=2, right=0),
    Call("window", T=700, S=900, H=2, HKV=1, left=200, right=30),
    Call("softcap", T=400, S=400, right=0, softcap=5.0),
    Call("softcap, no mask", T=400, S=433, softcap=5.0),
    Call("softcap, window", T=400, S=500, left=150, right=20, softcap=5.0),
    Call("packed", T=700, S=700, q_lengths=(5, 0, 400, 295), k_lengths=(5, 0, 400, 295), right=0),
    Call("packed, no mask", T=700, S=700, q_lengths=(5, 0, 400, 295), k_lengths=(5, 0, 400, 295)),
    Call("used", B=3, T=200, S=450, used=(450, 9, 0), right=0),
    Call("sinks", B=2, T=300, S=300, H=4, HKV=2, right=0, has=frozenset({"sinks"})),
    Call("many", B=8, T=520, S=520, H=8, HKV=8, right=0),
]


def on_gpu(call: Call, D: int) -> AttentionInputs:
    terms = Call(**{**vars(call), "D": D, "DV": D, "scale": D**-0.5}).terms(torch.bfloat16)
    moved = AttentionInputs(*(None if x is None else x.cuda() for x in terms))
    if reason := unsupported_reason(moved, call.options):
        pytest.skip(reason)
    return moved


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_kernels_match_reference(call: Call, D: int) -> None:
    from slipstream.kernels.attention.sm90 import launch

    terms = on_gpu(call, D)
    do, dlse = (
        x.cuda()
        for x in incoming(AttentionInputs(*(None if x is None else x.cpu() for x in terms)))
    )
    options = AttentionOptions(D**-0.5, *call.options[1:])
    right = want(terms, options, do, dlse)
    found = got(launch, terms, options, do, dlse)
    check(found, right, 2e-2, call.name)
    for name, x in got(launch, terms, options, do, dlse).items():
        assert torch.equal(x, found[name]), f"{name} differs from run to run"


@pytest.mark.parametrize("D", [64, 128, 256])
def test_packed_nan_stays_in_its_sequence(D: int) -> None:
    from slipstream.kernels.attention.sm90 import launch

    call = Call("pair", B=2, T=333, S=333, H=2, HKV=2, right=0)
    terms, options = on_gpu(call, D), AttentionOptions(D**-0.5, -1, 0)
    alone = AttentionInputs(*(x[:1].clone() for x in terms[:3]))
    do = torch.randn_like(terms.q)
    for x in (*terms[:3], do):
        x[1] = torch.nan
    found = got(launch, terms, options, do, None)
    for name, x in got(launch, alone, options, do[:1].clone(), None).items():
        assert torch.equal(found[name][:1], x), name


@pytest.mark.parametrize("D", [128])
def test_graph_replays_with_other_lengths(D: int) -> None:
    from slipstream.kernels.attention.sm90 import launch

    packed = next(x for x in CALLS if x.name == "packed")
    terms, options = on_gpu(packed, D), AttentionOptions(D**-0.5, -1, 0)
    do = torch.randn_like(terms.q)
    got(launch, terms, options, do, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = got(launch, terms, options, do, None)
    assert terms.cu_q is not None
    terms.cu_q.copy_(torch.tensor([0, 300, 300, 650, 700]))
    if terms.cu_k is not None and terms.cu_k is not terms.cu_q:
        terms.cu_k.copy_(terms.cu_q)
    graph.replay()
    for name, x in got(launch, terms, options, do, None).items():
        assert torch.equal(captured[name], x), name
