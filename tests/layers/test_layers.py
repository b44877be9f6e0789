"""Properties of every layer; attention makes no dense mask, rwkv7 takes other projections."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream import layers
from slipstream.layers import MLA, RWKV7, Attention, Mixer, base, rwkv7
from slipstream.layers.attention import expect_room
from slipstream.runtime import token_ids
from tests.support.small_layers import LAYERS, D, make

# seconds each: one of each kind of state, the rest are slow
COMPILED = ("GatedDeltaNet", "Attention-grouped")
every_layer = pytest.mark.parametrize("name", LAYERS)


def first_value_for(name: str, x: Tensor) -> dict[str, Tensor]:
    """The value that an earlier layer of the model would have returned."""
    return {"first_value": x.sin()} if name == "RWKV7-later" else {}


def run(layer: Mixer, name: str, x: Tensor, **options: Any) -> tuple[Tensor, Any]:
    return layer(x, **first_value_for(name, x), **options)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def assert_state_near(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        # what is past a sequence's end belongs to none
        if name in ("k", "v", "f", "latent", "index_k"):
            for n, length in enumerate(want["length"].tolist()):
                torch.testing.assert_close(got[name][n, :length], x[n, :length])
        else:
            torch.testing.assert_close(got[name], x, rtol=1e-4, atol=1e-4)


@every_layer
def test_layer_split_equals_whole(name: str) -> None:
    layer, x = make(name), torch.randn(2, 23, D)
    whole, end = run(layer, name, x, use_cache=True)
    parts, state = [], None
    for begin, stop in [(0, 1), (1, 14), (14, 15), (15, 23)]:
        given = None if state is None else {key: value.clone() for key, value in state.items()}
        y, after = run(layer, name, x[:, begin:stop], state=state, use_cache=True)
        if given is not None:
            assert state is not None
            assert all(torch.equal(given[key], state[key]) for key in given)
        parts.append(y)
        state = after
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    assert state is not None
    assert_state_near(state, end)


@every_layer
def test_layer_decodes_as_it_trains(name: str) -> None:
    layer, x = make(name), torch.randn(2, 21, D)
    whole, _ = run(layer, name, x)
    with torch.no_grad():
        y, state = run(layer, name, x[:, :15], use_cache=True)
        parts = [y]
        for t in range(15, 21):
            y, state = run(layer, name, x[:, t : t + 1], state=state, use_cache=True)
            parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@torch.no_grad()
def test_layer_step_updates_the_state_in_place(name: str, dtype: torch.dtype) -> None:
    layer, x = make(name).to(dtype), torch.randn(3, 16, D, dtype=dtype)
    _, state = run(layer, name, x[:, :7], use_cache=True)
    pool = {n: s.clone() for n, s in state.items()}
    for n in layer.token_states:
        pool[n] = F.pad(pool[n], (0, 0) * (pool[n].dim() - 2) + (0, 9), value=torch.nan)
    at = {n: s.data_ptr() for n, s in pool.items()}
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype != torch.bfloat16 else {"rtol": 0.1, "atol": 0.1}
    for begin, stop in [(7, 8), (8, 9), (9, 12), (12, 13)]:
        part = x[:, begin:stop]
        want, state = run(layer, name, part, state=state, use_cache=True)
        got = layer.step(part, pool, **first_value_for(name, part))
        torch.testing.assert_close(got, want, **close)
    assert at == {n: s.data_ptr() for n, s in pool.items()}
    for n, s in state.items():
        used = pool[n][:, : s.shape[1]] if n in layer.token_states else pool[n]
        torch.testing.assert_close(used, s, **close)


@every_layer
def test_layer_packed_equals_separate(name: str) -> None:
    layer, lengths = make(name), (4, 0, 17, 1)
    x, more = torch.randn(1, 22, D), torch.randn(1, 9, D)
    y, state = run(layer, name, x, cu_seqlens=offsets(lengths), use_cache=True)
    again = (2, 3, 0, 4)
    z, end = run(layer, name, more, cu_seqlens=offsets(again), state=state, use_cache=True)
    ys = zip(x.split(lengths, 1), more.split(again, 1))
    for n, (first, second) in enumerate(ys):
        want, want_end = run(layer, name, torch.cat([first, second], 1), use_cache=True)
        got = torch.cat([y.split(lengths, 1)[n], z.split(again, 1)[n]], 1)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert_state_near({key: value[n : n + 1] for key, value in end.items()}, want_end)


@every_layer
def test_layer_is_batch_invariant(name: str) -> None:
    layer, x = make(name), torch.randn(3, 9, D)
    y, _ = run(layer, name, x)
    x = x.clone()
    x[0] = torch.nan
    again, _ = run(layer, name, x)
    torch.testing.assert_close(again[1:], y[1:], rtol=1e-5, atol=1e-5)


@every_layer
@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
def test_layer_grads_reach_every_parameter(name: str, is_packed: bool) -> None:
    layer = make(name)
    x = torch.randn(1 if is_packed else 2, 20, D, requires_grad=True)
    y, _ = run(layer, name, x, cu_seqlens=offsets((7, 13)) if is_packed else None)
    y.square().sum().backward()
    for key, parameter in [*layer.named_parameters(), ("x", x)]:
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@every_layer
def test_layer_in_bfloat16_stays_near_float32(name: str) -> None:
    layer, x = make(name), torch.randn(2, 20, D)
    want, _ = run(layer, name, x)
    layer.to(torch.bfloat16)
    got, state = run(layer, name, x.bfloat16(), use_cache=True)
    assert got.dtype == torch.bfloat16
    assert "recurrent" not in state or state["recurrent"].dtype == torch.float32
    # of blocks that score alike an indexer may take another
    few = 14 if hasattr(layer, "index_proj") else 20
    assert (got.float() - want).norm(dim=-1).sort()[0][:, :few].norm() < 0.05 * want.norm()


@every_layer
@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (1, 0)], ids=str)
def test_layer_takes_nothing(name: str, shape: tuple[int, int]) -> None:
    layer = make(name)
    y, state = run(layer, name, torch.randn(*shape, D), use_cache=True)
    assert y.shape == (*shape, D)
    assert not any(x.isnan().any() for x in state.values())


@every_layer
@torch.no_grad()
def test_layer_steps_no_sequences_and_no_tokens(name: str) -> None:
    layer, x = make(name), torch.randn(2, 5, D)
    _, state = run(layer, name, x[:, :3], use_cache=True)
    none = {n: s[:0] for n, s in state.items()}
    for part in (x[:0, 3:4], x[:0, 3:]):
        assert layer.step(part, none, **first_value_for(name, part)).shape == part.shape
    part, before = x[:, :0], {n: s.clone() for n, s in state.items()}
    assert layer.step(part, state, **first_value_for(name, part)).shape == part.shape
    assert_state_near(state, before)


# torch's own: of importing Inductor, and of Dynamo making an autograd.Function's ctx
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in COMPILED else pytest.mark.slow) for name in LAYERS],
)
def test_layer_compiles_fullgraph_without_recompiling(name: str) -> None:
    torch._dynamo.reset()
    layer = make(name)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, T in enumerate((37, 50, 29)):
        x = torch.randn(1, T, D)
        options = {"cu_seqlens": offsets((9, T - 9)), **first_value_for(name, x)}
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            y, _ = compiled(x, **options)
        y.sum().backward()
        torch.testing.assert_close(y, layer(x, **options)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [1, D + 1])
@every_layer
def test_layer_refuses_other_widths(name: str, channels: int) -> None:
    """One channel as well, which elementwise operations would broadcast."""
    wrong, refusal = torch.randn(2, 5, channels), "want shape|shapes cannot be multiplied"
    with pytest.raises((ValueError, RuntimeError), match=refusal):
        run(make(name), name, wrong)


@pytest.mark.parametrize("channels", [1, D + 1])
def test_rwkv7_channel_mix_refuses_other_widths(channels: int) -> None:
    with pytest.raises(ValueError, match=r"^x: want shape"):
        layers.RWKV7ChannelMix(D, 2 * D, 0, 1)(torch.randn(2, 5, channels))


@every_layer
def test_layer_refuses_inputs_by_name(name: str) -> None:
    layer, x = make(name), torch.randn(2, 3, D)
    wrong: dict[str, list[tuple[Any, dict[str, Any]]]] = {
        "x: want": [(x[0], {}), (x.long(), {})],
        "state: want": [(x, {"state": value}) for value in ("x", [x], {}, {"other": x})],
        "positions: want": [
            (x, {"positions": value}) for value in ("x", x, torch.ones(5, 5).int())
        ],
        "cu_seqlens: want": [(x, {"cu_seqlens": value}) for value in ([0, 6], "x")],
    }
    for words, calls in wrong.items():
        for given, options in calls:
            with pytest.raises((ValueError, TypeError), match=f"^{words}"):
                layer(given, **options)
            if "cu_seqlens" not in options:
                with pytest.raises((ValueError, TypeError), match=f"^({words}|state: want)"):
                    layer.step(given, options.pop("state", None), **options)


@pytest.mark.parametrize("stepped", [False, True], ids=["call", "step"])
@every_layer
def test_layer_refuses_states_of_other_calls(name: str, stepped: bool) -> None:
    """Of other rows, sizes, dtypes or devices, and what is no tensor: by name."""
    layer, x = make(name), torch.randn(2, 3, D)
    with torch.no_grad():
        _, state = run(layer, name, x, use_cache=True)
    wrong: list[dict[str, Any]] = [
        {n: torch.cat([s, s[:1]]) for n, s in state.items()},
        {n: s[:1].clone() for n, s in state.items()},
    ]
    for n, s in state.items():
        others: list[Any] = [None, s.tolist(), s.to("meta"), s[:1], s.flatten()[0], s[None]]
        others += [s.bool(), s.float() if n == "length" else s.long(), s.to(torch.complex64)]
        others += [torch.cat([s, s], -1), s.narrow(-1, 0, 1)] if s.dim() > 1 else []
        wrong += [state | {n: other} for other in others]
    x = x[:, :1] if stepped else x
    step = partial(layer.step, x, **first_value_for(name, x))
    call = step if stepped else partial(run, layer, name, x, use_cache=True)
    for given in wrong:
        with torch.no_grad(), pytest.raises((ValueError, TypeError), match=r"^state\["):
            call(state=given)


@every_layer
def test_step_refuses_expanded_states_by_name(name: str) -> None:
    """Rows in one place: a step would write them all."""
    layer, x = make(name), torch.randn(2, 3, D)
    with torch.no_grad():
        _, state = run(layer, name, x, use_cache=True)
    x = x[:, :1]
    for n in state.keys() - {"length"}:
        given = state | {n: state[n][:1].expand_as(state[n])}
        words = rf"^state\['{n}'\]: want memory that a step can write into"
        with torch.no_grad(), pytest.raises(ValueError, match=words):
            layer.step(x, given, **first_value_for(name, x))


@pytest.mark.parametrize("name", [n for n in LAYERS if make(n).token_states])
@pytest.mark.parametrize("tokens", [1, 2])
@torch.no_grad()
def test_step_without_room_is_refused_by_name(name: str, tokens: int) -> None:
    layer, x = make(name), torch.randn(2, 3 + tokens, D)
    _, state = run(layer, name, x[:, :3], use_cache=True)
    words = rf"^state\['\w+'\]: want room for {tokens} more tokens, got 3 places, 3 of them used$"
    with pytest.raises(ValueError, match=words):
        layer.step(x[:, 3:], state)


@torch.no_grad()
def test_room_is_looked_for_before_a_device_would() -> None:
    """As `append` does on CUDA, where an index past a cache ends the process."""
    state = {"k": torch.zeros(2, 5, 1, 4), "length": torch.tensor([3, 2])}
    expect_room("k", state, 2)
    assert state["length"].tolist() == [3, 2]
    with pytest.raises(
        ValueError, match=r"^state\['k'\]: want room for 6 more tokens, got 5 places$"
    ):
        expect_room("k", state, 6)
    with pytest.raises(ValueError, match=r"^state\['length'\]: want less than the 3 .* got 3$"):
        expect_room("k", state, 3)
    with mock.patch.object(token_ids, "expect_below"):  # whose error comes with the next call
        expect_room("k", state, 3)
    assert state["length"].tolist() == [2, 2]


@pytest.mark.parametrize("name", [n for n in LAYERS if make(n).token_states])
@torch.no_grad()
def test_state_with_room_is_blamed_for_no_index(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(name), torch.randn(2, 4, D)
    _, state = run(layer, name, x[:, :3], use_cache=True)
    for n in layer.token_states:
        state[n] = F.pad(state[n], (0, 0) * (state[n].dim() - 2) + (0, 1))
    monkeypatch.setattr(layer, "_advance", lambda *_: [][1])
    with pytest.raises(IndexError):
        layer.step(x[:, 3:], state)


@pytest.mark.parametrize("way", ["float32", "bfloat16", "autocast"])
@every_layer
def test_layers_own_state_is_blamed_for_no_error(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of a user's module: whatever dtypes the layer gives its state."""
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    layer, x = make(name).to(dtype), torch.randn(2, 3, D).to(dtype)
    mix, errors = layer._mix_tokens, []

    def failing(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return mix(*args, **options)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        _, state = run(layer, name, x, use_cache=True)
        monkeypatch.setattr(layer, "_mix_tokens", failing)
        for error in (ZeroDivisionError, KeyError):
            errors.append(error("of a user's module"))
            with pytest.raises(error):
                run(layer, name, x, use_cache=True, state=state)


@pytest.mark.parametrize("way", ["call", "step"])
def test_first_values_of_other_tokens_are_refused(way: str) -> None:
    layer, x = make("RWKV7-later"), torch.randn(2, 3, D)
    call: Any = layer
    with torch.no_grad():
        value, (_, state) = x.sin(), run(layer, "RWKV7-later", x, use_cache=True)
    if way == "step":
        x, value = x[:, :1], value[:, :1]
        call = partial(layer.step, state=state)
    wrong: list[Any] = [value.tolist(), value.to("meta"), value.long(), value.bool()]
    wrong += [value[:1], value[None], value.flatten()[0], value[..., :1], value[:, :0]]
    for first in wrong:
        with torch.no_grad(), pytest.raises((ValueError, TypeError), match=r"^first_value: want"):
            call(x, first_value=first)


@every_layer
def test_layer_says_itself_whether_its_step_is_fused(name: str) -> None:
    """Not a class that it has another step than: a block leaves its norm to one that is fused."""
    classes = type(make(name)).mro()

    def defined(method: str) -> int:
        return next(i for i, x in enumerate(classes) if method in vars(x))

    assert defined("has_fused_step") <= min(defined("decode"), defined("_advance")) or (
        not make(name).has_fused_step()
    )


def test_rwkv7_first_value() -> None:
    first, second = make("RWKV7", layer_idx=2), make("RWKV7", layer_idx=3)
    x = torch.randn(1, 5, D)
    y, _, v = first(x, output_value=True)
    torch.testing.assert_close(first(x)[0], y)
    assert not torch.allclose(second(x, first_value=v)[0], second(x)[0])


def test_rwkv7_rejects_a_first_value_for_layer_0() -> None:
    x = torch.randn(1, 5, D)
    with pytest.raises(ValueError, match="first_value: want None for layer_idx 0"):
        make("RWKV7")(x, first_value=x)


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("GatedDeltaNet", {"num_heads": 5}, "num_heads"),
        ("GatedDeltaNet", {"num_v_heads": 3}, "num_heads"),
        ("GatedDeltaNet", {"mode": "parallel"}, "mode"),
        ("Attention", {"num_kv_heads": 3, "num_heads": 4}, "num_kv_heads"),
        ("RWKV7", {"head_dim": 5, "num_heads": 2}, "head_dim"),
        ("Mamba2", {"head_dim": 5}, "head_dim"),
        ("Mamba2", {"n_groups": 3}, "n_groups"),
        ("GatedLinearAttention", {"num_kv_heads": 3}, "num_kv_heads"),
        ("GatedLinearAttention", {"feature_map": "dpfp"}, "feature_map: want .*got 'dpfp'"),
        ("GatedLinearAttention", {"gate_activation": "relu"}, "gate_activation: want 'silu' or"),
        ("MultiScaleRetention", {"num_kv_heads": 3}, "num_kv_heads"),
        ("MultiScaleRetention", {"feature_map": "dpfp"}, "feature_map: want .*got 'dpfp'"),
        ("GatedDeltaNet", {"gate_activation": "relu"}, "gate_activation: want 'silu' or"),
        ("DeltaNet", {"qk_activation": "gelu"}, "qk_activation: want .*got 'gelu'"),
        ("DeltaNet", {"qk_norm": "l1"}, "qk_norm: want 'l2' or 'sum', got 'l1'"),
    ],
)
def test_layer_rejects_sizes_that_do_not_fit(name: str, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make(name, **options)


@pytest.mark.parametrize(
    ("name", "option", "least"),
    [
        ("Attention", "window_size", 1),
        ("ForgettingAttention", "window_size", 1),
        ("MLA", "rope_head_dim", 2),
        ("GatedDeltaProduct", "num_householder", 1),
        ("Mamba3", "mimo_rank", 1),
        ("HGRN", "lower_bound", 0),
    ],
)
def test_layer_takes_the_least_size(name: str, option: str, least: int) -> None:
    with pytest.raises(ValueError, match=option):
        make(name, **{option: least - 1})
    layer, x = make(name, **{option: least}), torch.randn(2, 5, D)
    whole, state = layer(x)[0], layer(x[:, :4], use_cache=True)[1]
    torch.testing.assert_close(layer(x[:, 4:], state=state)[0], whole[:, 4:], rtol=1e-4, atol=1e-4)


@every_layer
def test_layer_rejects_no_index(name: str) -> None:
    for layer_idx in (None, -1, "3"):
        with pytest.raises(ValueError, match="layer_idx: want an int, at least 0, got"):
            make(name, layer_idx=layer_idx)


@every_layer
@torch.no_grad()
def test_default_dtype_changes_nothing(name: str) -> None:
    layer, x = make(name).bfloat16(), torch.randn(2, 23, D).bfloat16()
    want = run(layer, name, x)[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = run(layer, name, x)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_norm_across_ranks_is_that_of_all_heads(
    gated: bool, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    o, gate = torch.randn(2, 1, 3, 8).unbind()
    one: Any = SimpleNamespace(norm_weight=torch.rand(8), norm_eps=1e-5, head_shard=None)
    ranks: Any = SimpleNamespace(**vars(one) | {"head_shard": "of one rank"}, norms_across=True)
    monkeypatch.setattr(
        base.context_exchange, "norm_of_parts", lambda x, eps, _: F.rms_norm(x, (8,), eps=eps)
    )
    want, got = (
        Mixer._norm_of_all_heads(x, o, gate if gated else None, norm_before_gate=before)
        for x in (one, ranks)
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layer", [Attention, MLA])
def test_packed_sequences_need_no_dense_mask(monkeypatch: Any, layer: type) -> None:
    calls = []
    torchs = F.scaled_dot_product_attention

    def watched(q: Any, *args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        assert attn_mask is None
        calls.append(q.shape[2])
        return torchs(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    widths = {} if layer is Attention else {"nope_head_dim": 4, "rope_head_dim": 4, "v_head_dim": 8}
    made = layer(16, 2, **widths)
    offsets = torch.tensor([0, 9, 9, 12, 30], dtype=torch.int32)
    _, state = made(torch.randn(1, 30, 16), cu_seqlens=offsets, use_cache=True)
    assert calls == [9, 0, 3, 18]
    made(torch.randn(1, 30, 16), cu_seqlens=offsets, state=state)


def test_projections_with_a_bias_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel mixes tokens for matrices, which have none."""
    taken: list[bool] = []
    monkeypatch.setattr(rwkv7.token_mix, "mixed_projections", lambda *a, **k: taken.append(True))
    layer = RWKV7(hidden_size=32, num_heads=2)
    nn.init.normal_(layer.o_proj.weight)  # which starts at 0
    x = torch.randn(1, 5, 32)
    before = layer(x)[0]
    assert taken
    taken.clear()
    biased = nn.Linear(32, 32)
    with torch.no_grad():
        biased.weight.copy_(layer.r_proj.weight)
    layer.r_proj = biased
    after = layer(x)[0]
    assert not taken
    assert not torch.equal(after, before)


@pytest.mark.parametrize(("width", "ranks"), [(768, (64, 64, 128, 32)), (2560, (96, 96, 320, 64))])
def test_ranks_are_those_of_released_models(width: int, ranks: tuple[int, ...]) -> None:
    """Of w, a, g and v: RWKV-7 of 0.1B and of 2.9B."""
    with torch.device("meta"):
        layer: Any = RWKV7(width, head_dim=64, layer_idx=1)
    loras = layer.w_lora, layer.a_lora, layer.g_lora, layer.v_lora
    assert tuple(x.down.shape[1] for x in loras) == ranks
