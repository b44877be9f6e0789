"""Which calls the kernels of sm_90 take, and why they refuse the others."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream import ops
from slipstream.compiler.trace import trace
from slipstream.kernels.linear import dispatch, plan
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.plan import sm90_unsupported_reason
from tests.support import wants


def terms(K: int = 128, dtype: torch.dtype = torch.bfloat16, **more: torch.Tensor) -> LinearInputs:
    """Packed, with an initial state; further terms are added to q, k and v."""
    q, k = (torch.ones(1, 192, 1, K, dtype=dtype) for _ in range(2))
    v, state = torch.ones(1, 192, 2, K, dtype=dtype), torch.ones(2, 2, K, K)
    cu = torch.ones(3, dtype=torch.int32)
    return LinearInputs(q, k, v, initial_state=state, cu_seqlens=cu, **more)


HEAD = torch.ones(1, 192, 2)


@pytest.fixture
def on_sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (terms(g=HEAD), terms(g=HEAD, beta=HEAD)):
        assert "sm_90" in str(sm90_unsupported_reason(given))
    monkeypatch.setattr(plan.backends, "sm90_unsupported", lambda x: None)


@pytest.mark.usefixtures("on_sm90")
def test_delta_rule_refusals_say_why() -> None:
    given = terms(g=HEAD, beta=HEAD)
    assert sm90_unsupported_reason(given) is None
    wide = F.pad(given.q, (0, 8))
    assert "one of (64, 128)" in str(sm90_unsupported_reason(given._replace(q=wide, k=wide)))
    for width in (96, 192, 320):
        v = torch.zeros(*given.v.shape[:3], width, dtype=given.v.dtype)
        assert "V of (64, 128, 256)" in str(sm90_unsupported_reason(given._replace(v=v)))
    assert "float16" in str(sm90_unsupported_reason(given._replace(q=given.q.float())))
    assert "takes no p" in str(sm90_unsupported_reason(given._replace(p=given.k)))
    columns = given._replace(gv=torch.zeros(*given.v.shape))
    assert "takes no gv" in str(sm90_unsupported_reason(columns))
    channel = given._replace(g=torch.zeros(*given.v.shape))
    assert sm90_unsupported_reason(channel) is None
    wide = F.pad(given.v, (0, 64))
    assert "K and V have to be" in str(sm90_unsupported_reason(channel._replace(v=wide)))


@pytest.mark.usefixtures("on_sm90")
def test_scalar_decay_refusals_say_why() -> None:
    given = terms(g=HEAD)
    assert sm90_unsupported_reason(given) is None
    q, k, v = (x[..., :64] for x in given[:3])
    assert "128" in str(sm90_unsupported_reason(given._replace(q=q, k=k)))
    wider = given._replace(v=torch.cat([given.v, given.v], -1))
    assert "both 128 or both 256" in str(sm90_unsupported_reason(wider))
    assert "128" in str(sm90_unsupported_reason(given._replace(v=v)))
    assert "float16" in str(sm90_unsupported_reason(given._replace(q=given.q.float())))
    assert "one gate" in str(sm90_unsupported_reason(given._replace(u=given.k[0, 0])))
    # the delta rule's kernels take that
    assert sm90_unsupported_reason(given._replace(beta=given.g)) is None


@pytest.mark.usefixtures("on_sm90")
def test_vector_decay_refusals_say_why() -> None:
    g = torch.zeros(1, 192, 2, 128, dtype=torch.bfloat16)
    given = terms(g=g, u=torch.ones(2, 128))
    assert sm90_unsupported_reason(given) is None
    narrow = {n: x[..., :64] for n, x in given._asdict().items() if n in ("q", "k", "g")}
    assert "128" in str(sm90_unsupported_reason(given._replace(**narrow)))
    assert "128" in str(sm90_unsupported_reason(given._replace(v=given.v[..., :64])))
    for name in "qkvg":
        for dtype in (torch.float16, torch.float32):
            other = given._replace(**{name: getattr(given, name).to(dtype)})
            assert f"{name} is {dtype}" in str(sm90_unsupported_reason(other))
    assert "one gate" in str(sm90_unsupported_reason(given._replace(g=None)))
    few = (x[:, :1].expand(1, 2048, *x.shape[2:]) for x in (*given[:3], g))
    assert "few heads" in str(sm90_unsupported_reason(LinearInputs(*few)))


@pytest.mark.parametrize(
    ("K", "V", "columns"), [(128, 256, 2), (128, 512, 4), (256, 512, 2), (256, 128, None)]
)
@pytest.mark.usefixtures("on_sm90")
def test_columns_are_split_for_them(K: int, V: int, columns: int | None) -> None:
    q, v = (torch.ones(1, 64, 1, width, dtype=torch.bfloat16) for width in (K, V))
    groups = dispatch._groups_for_sm90(LinearInputs(q, q, v), None)
    assert groups == (None if columns is None else (1, K, columns, V // columns))


FUSED = "kda_fused_fwd_sm90_kernel"
# B, T, heads of q and of v, what is other than bfloat16 with gates of float32; whether the forward
# is one kernel.
KDA: dict[str, tuple[tuple[int, int, int, int], dict[str, Any], bool]] = {
    "many heads": ((1, 448, 64, 64), {}, True),
    "a head less": ((1, 448, 63, 63), {}, False),
    "shared heads": ((4, 70, 4, 16), {}, True),
    "a row less": ((3, 70, 4, 16), {}, False),
    "packed": ((1, 1024, 32, 64), {"packed": 2}, True),
    "packed of few heads": ((1, 1024, 16, 32), {"packed": 5}, False),
    "packed of some heads": ((1, 1024, 16, 32), {"packed": 8}, True),
    "in eight segments": ((1, 4096, 16, 16), {}, True),
    "of seven blocks": ((1, 3584, 16, 16), {}, False),
    "in sixteen": ((1, 8192, 8, 8), {}, False),
    "in four": ((1, 8192, 33, 33), {}, True),
    "in three that do not fill": ((1, 8192, 34, 34), {}, False),
    "packed in segments": ((1, 16384, 32, 32), {"packed": 4}, True),
    "float16": ((8, 70, 8, 8), {"dtype": torch.float16}, False),
    "gates of 16 bits": ((8, 70, 8, 8), {"g": torch.bfloat16}, False),
    "narrow": ((8, 70, 8, 8), {"K": 64}, False),
    "consistent": ((8, 70, 8, 8), {"consistent": True}, False),
    "erase by channel": ((8, 70, 8, 8), {"erase": True}, False),
    "raw gates": ((8, 70, 8, 8), {"raw": True}, True),
}


@wants.compiler
@pytest.mark.parametrize("case", KDA.values(), ids=KDA)
def test_kda_forward_goes_in_one_kernel(case: tuple[tuple, dict[str, Any], bool]) -> None:
    """With gradients too: backward makes what it needs itself."""
    (B, T, H, HV), other, want = case
    K, dtype = other.get("K", 128), other.get("dtype", torch.bfloat16)

    def call(device: torch.device, grads: bool) -> Any:
        make: dict[str, Any] = {"device": device, "requires_grad": grads}
        q, k = (torch.empty(B, T, H, K, dtype=dtype, **make) for _ in range(2))
        v = torch.empty(B, T, HV, K, dtype=dtype, **make)
        g = torch.empty(B, T, HV, K, dtype=other.get("g", torch.float32), **make)
        beta = torch.empty(B, T, HV, **make)
        options: dict[str, Any] = {n: other[n] for n in ("consistent",) if n in other}
        if N := other.get("packed"):
            options["cu_seqlens"] = torch.empty(N + 1, dtype=torch.int32, device=device)
            options["initial_state"] = torch.empty(N, HV, K, K, device=device)
        if other.get("raw"):
            options |= {"use_gate_in_kernel": True, "A_log": torch.empty(HV, device=device)}
        if other.get("erase"):
            return ops.chunk_gdn2(q, k, v, g, torch.empty_like(v), torch.empty_like(v))
        return ops.chunk_kda(q, k, v, g, beta, **options)

    for grads in (False,) if other.get("consistent") else (False, True):  # leaves have no views
        names = {x.name for x in trace(partial(call, grads=grads), "sm_90", backward=grads)}
        assert (FUSED in names) == want
        assert grads or not (want and "dplr_chunk_fwd_sm90_kernel" in names)


@wants.compiler
@pytest.mark.parametrize("heads", [64, 65])
def test_views_of_heads_go_by_chunks(heads: int) -> None:
    """Whose kernels read them where they are."""
    from slipstream.kernels.linear.sm90.dplr import backend

    def call(device: torch.device) -> None:
        def part(dtype: torch.dtype, *width: int) -> torch.Tensor:
            return torch.empty(1, 70, heads, *width, dtype=dtype, device=device)[:, :, :64]

        q, k, v = (part(torch.bfloat16, 128) for _ in range(3))
        g, beta = part(torch.float32, 128), part(torch.float32)
        backend.forward(LinearInputs(q, k, v, g=g, beta=beta), 1.0)

    assert (FUSED in {x.name for x in trace(call, "sm_90")}) == (heads == 64)
