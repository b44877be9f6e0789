"""SGLang's Mamba-2 mixer and lightning backend, of both releases' own files, on slipstream's
functions: prompts, decoding, mixed batches and drafts against the recurrences, token by token. The
convolution and the norm leave their input, projections are given."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.integrations import report, sglang, sglang_functions
from tests.support import sglang_engine
from tests.support.sglang_engine import RELEASES, near

pytestmark = pytest.mark.slow
SLOTS, H, P, G, S, DRAFTS = 7, 4, 16, 2, 16, 3
MIXER, LIGHTNING = (
    "sglang.srt.layers.attention.mamba.mamba",
    f"{sglang_engine.FOLDER}.lightning_backend",
)


@pytest.fixture(params=RELEASES)
def engine(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with sglang_engine.engine_of(request.param) as found:
        yield found


def hooked(engine: SimpleNamespace, kind: str, name: str) -> Any:
    sglang.register_builtin(kind)
    engine.hooks.HookRegistry.apply_hooks()
    return sys.modules[name]


def refused(name: str) -> str:
    (row,) = [x for x in report().rows if (x.library, x.name) == ("sglang", name)]
    return " ".join(row.refused)


def caches(shape: tuple[int, ...]) -> SimpleNamespace:
    """A layer's pool, with gaps between slots, and room for drafts; no sequence has slot 1."""
    cache = sglang_engine.Speculative(SimpleNamespace(states=None, buffer=None))
    cache.temporal = torch.randn(SLOTS, 2, *shape)[:, 0]
    cache.intermediate_ssm = torch.zeros(5, DRAFTS, *shape)
    return cache


class Mixer:
    """What MambaMixer2.forward reads of itself, and the recurrence."""

    def __init__(self) -> None:
        inner, states = H * P, 2 * G * S
        self.in_proj = lambda x: (x, None)
        self.intermediate_size, self.conv_dim, self.num_heads = inner, inner + states, H
        self.groups_ssm_state_size, self.n_groups, self.ssm_state_size = G * S, G, S
        self.head_dim, self.tp_size, self.activation = P, 1, "silu"
        self.conv1d = SimpleNamespace(weight=torch.ones(inner + states, 1, 4), bias=None)
        self.A, self.D, self.dt_bias = -torch.rand(H) - 0.1, torch.randn(H), torch.randn(H)
        self.norm = lambda x, gate: x
        self.out_proj = lambda x: (x, None)

    def expected(self, x: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
        """y [T, H P] and the states after each token."""
        _, xBC, dt = x.double().split([H * P, self.conv_dim, H], -1)
        u, B, C = xBC.split([H * P, G * S, G * S], -1)
        u = u.unflatten(-1, (H, P))
        B, C = (t.unflatten(-1, (G, S)).repeat_interleave(H // G, 1) for t in (B, C))
        step, outputs, states = F.softplus(dt + self.dt_bias), [], []
        state = state.double()
        for t in range(len(x)):
            decay = (step[t] * self.A).exp()[:, None, None]
            state = state * decay + (step[t][:, None] * u[t])[..., None] * B[t][:, None]
            outputs.append((state @ C[t][..., None])[..., 0] + self.D[:, None] * u[t])
            states.append(state)
        return torch.stack(outputs).flatten(1), states


def mamba_metadata(lengths: list[int], decodes: int, slots: Tensor, **more: Any) -> SimpleNamespace:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    none = dict.fromkeys(
        ("track_conv_indices", "track_ssm_seq_idx", "track_ssm_end_locs", "retrieve_next_token",
         "retrieve_next_sibling", "retrieve_parent_token")
    )  # fmt: skip
    mixed = SimpleNamespace(
        has_initial_states=torch.tensor([True, False])[: len(lengths)], prep_initial_states=True,
        extend_seq_lens_cpu=lengths, chunk_size=64, seq_idx=None, chunk_indices=None,
        chunk_offsets=None,
    )  # fmt: skip
    return SimpleNamespace(**{
        **none, "num_prefills": len(lengths), "num_prefill_tokens": sum(lengths),
        "num_decodes": decodes, "is_target_verify": False, "draft_token_num": 1,
        "has_mamba_track_mask": False, "mixed_metadata": mixed, "query_start_loc": offsets,
        "mamba_cache_indices": slots, **more,
    })  # fmt: skip


def mixer_of(engine: SimpleNamespace) -> tuple[Any, Mixer]:
    """The module, hooked, and the forward of its class."""
    module = hooked(engine, "mamba2", MIXER)
    for name in ("causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_update_triton"):
        setattr(module, name, sglang_engine.convolved)
    return module, Mixer()


def call(module: Any, mixer: Mixer, x: Tensor, cache: Any, metadata: Any, **more: Any) -> Tensor:
    given = {"hidden_states": x, "layer_cache": cache, "metadata": metadata, **more}
    if "forward_batch" in module.MambaMixer2.forward.__annotations__:
        given["forward_batch"] = SimpleNamespace(mamba_track_mask=None)
    return module.MambaMixer2.forward(mixer, **given)[0]


def test_mixed_batches_of_mamba2(engine: SimpleNamespace) -> None:
    """Two prompts, of which the first goes on from a state, and tokens: three are padding."""
    module, mixer = mixer_of(engine)
    cache, slots = caches((H, P, S)), torch.tensor([4, 2, 5, -1, 3, 0, 0], dtype=torch.int32)
    before = cache.temporal.clone()
    x = torch.randn(70 + 33 + 5, H * P + mixer.conv_dim + H)
    got = call(module, mixer, x, cache, mamba_metadata([70, 33], 5, slots))
    first = {0: before[4], 1: torch.zeros(H, P, S), 2: before[5], 4: before[3]}
    starts, ends = (0, 70, 103, 104, 105), (70, 103, 104, 105, 106)
    for n, state in first.items():
        want, states = mixer.expected(x[starts[n] : ends[n]], state)
        near(got[starts[n] : ends[n]], want)
        near(cache.temporal[slots[n]], states[-1])
        before[slots[n]] = cache.temporal[slots[n]]
    assert torch.equal(cache.temporal, before)


def test_drafts_of_mamba2(engine: SimpleNamespace) -> None:
    """A chain of each of three sequences, of which one is padding; a tree is SGLang's."""
    module, mixer = mixer_of(engine)
    cache, slots = caches((H, P, S)), torch.tensor([4, -1, 5], dtype=torch.int32)
    before = cache.temporal.clone()
    x = torch.randn(3 * DRAFTS, H * P + mixer.conv_dim + H)
    more = {"is_target_verify": True, "draft_token_num": DRAFTS}
    metadata = mamba_metadata([], 3, slots, **more)
    got = call(module, mixer, x, cache, metadata, use_triton_causal_conv=True)
    assert torch.equal(cache.temporal, before)
    for n in (0, 2):
        mine = slice(n * DRAFTS, (n + 1) * DRAFTS)
        want, states = mixer.expected(x[mine], before[slots[n]])
        near(got[mine], want)
        near(cache.intermediate_ssm[n], torch.stack(states))
    metadata.retrieve_parent_token = torch.zeros(3, DRAFTS)
    call(module, mixer, x, cache, metadata, use_triton_causal_conv=True)
    assert "retrieve_parent_token:" in refused("Mamba2AttnBackend.selective_state_update")


def test_prefixes_of_mamba2_are_sglangs(engine: SimpleNamespace) -> None:
    """Passes that leave states for prefixes, and no others."""
    module, _ = mixer_of(engine)
    Base = sglang_engine.Base

    class Theirs(Base):
        def init_forward_metadata(self, batch: Any) -> None:
            self.forward_metadata = SimpleNamespace(num_prefills=batch.prefills)

        def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
            pass

        def forward(self) -> Any:
            return module.mamba_chunk_scan_combined(return_varlen_states=True, **given)

    sglang_functions._backend.cache_clear()
    source = sys.modules["sglang.srt.layers.attention.hybrid_linear_attn_backend"]
    source.Mamba2AttnBackend = Theirs
    backend: Any = object.__new__(sglang_functions._backend("mamba2"))
    x, dt, states = torch.randn(1, 5, H, P), torch.randn(1, 5, H), torch.randn(1, 5, G, S)
    given = {"x": x, "dt": dt, "A": -torch.rand(H), "B": states, "C": states, "chunk_size": 64}
    given |= {"cu_seqlens": torch.tensor([0, 5]), "out": torch.empty(1, 5, H, P)}
    for mask, prefills in ((None, 1), (torch.ones(1), 0), (torch.ones(1), 1)):
        backend.init_forward_metadata(SimpleNamespace(mamba_track_mask=mask, prefills=prefills))
        found = backend.forward()
        assert isinstance(found, str) == (mask is not None and prefills > 0)
    assert "mamba_track_mask:" in refused("Mamba2AttnBackend.mamba_chunk_scan_combined")
    backend.init_forward_metadata_out_graph(None)
    assert isinstance(backend.forward(), Tensor)


def test_mamba1_stays_with_sglang(engine: SimpleNamespace) -> None:
    """Its rates are of channels: the call is that of its mixer."""
    module, _ = mixer_of(engine)
    state, x = torch.randn(SLOTS, 6, 1, S), torch.randn(2, 6, 1)
    before = state.clone()
    B = torch.randn(2, 1, S)
    found = module.selective_state_update(
        state, x, x, -torch.rand(6, 1, S), B, B, torch.ones(6, 1), dt_bias=torch.zeros(6, 1),
        dt_softplus=True, state_batch_indices=torch.tensor([1, 2]), out=torch.empty_like(x),
    )  # fmt: skip
    assert found == "SGLang's selective_state_update" and torch.equal(state, before)


class Lightning:
    """The recurrence, and a backend of SGLang's class without its server."""

    def __init__(self, module: Any, metadata: Any) -> None:
        self.slopes = torch.rand(H) / 2
        self.cache = caches((H, S, S))
        pool = SimpleNamespace(mamba2_layer_cache=lambda layer: self.cache)
        self.backend: Any = object.__new__(module.LightningAttentionBackend)
        self.backend.req_to_token_pool, self.backend.linear_backend = pool, "seg_la"
        self.backend.tp_slope, self.backend.kv_cache_dtype_str = [self.slopes.view(H, 1, 1)], "auto"
        self.backend.forward_metadata = metadata
        module.mamba_cache_chunk_size = lambda: 64

    def run(self, method: str, x: tuple[Tensor, ...], verify: bool = False, **batch: Any) -> Tensor:
        layer = SimpleNamespace(
            layer_id=0, k_scale=None, tp_q_head_num=H, v_head_dim=S, head_dim=S, scaling=S**-0.5
        )
        mode = SimpleNamespace(is_target_verify=lambda: verify)
        given = {"mamba_track_mask": None, **batch, "forward_mode": mode}
        return getattr(self.backend, method)(*x, layer, SimpleNamespace(**given))

    def expected(self, x: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        q, k, v = (t.double() for t in x)
        decay, states, outputs = (-self.slopes.double()).exp()[:, None, None], [], []
        state = state.double()
        for t in range(len(q)):
            state = state * decay + k[t][..., None] * v[t][:, None]
            outputs.append((q[t][:, None] @ state)[:, 0] * S**-0.5)
            states.append(state)
        return torch.stack(outputs).flatten(1), states


def lightning_metadata(lengths: list[int], slots: list[int], has: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
        mamba_cache_indices=torch.tensor(slots, dtype=torch.int32),
        has_initial_states=torch.tensor(has), batch_size=len(lengths), num_prefills=len(lengths),
        has_mamba_track_mask=False, track_ssm_final_dst=None, track_ssm_h_dst=None,
    )  # fmt: skip


@pytest.mark.parametrize("tracked", [False, True])
def test_prompts_of_lightning(engine: SimpleNamespace, tracked: bool) -> None:
    """A prompt that goes on, a new one and padding; of the first the state after 64 tokens."""
    if tracked and engine.release == RELEASES[1]:
        pytest.skip("0.5.16 leaves no such states")
    module = hooked(engine, "lightning", LIGHTNING)
    metadata = lightning_metadata([70, 33, 2], [4, 2, -1], [1, 0, 0])
    ours = Lightning(module, metadata)
    before = ours.cache.temporal.clone()
    x = tuple(torch.randn(105, H, S) for _ in range(3))
    batch: dict[str, Any] = {}
    if tracked:
        metadata.has_mamba_track_mask, metadata.track_ssm_h_dst = True, torch.tensor([6])
        batch["mamba_track_mask"] = torch.tensor([True, False, False])
        batch["extend_seq_lens"] = torch.tensor([70, 33, 2])
        batch["extend_prefix_lens"] = torch.tensor([64, 0, 0])
        batch["mamba_track_seqlens"] = torch.tensor([134, 0, 0])
    got = ours.run("forward_extend", x, **batch)
    for n, (at, first) in enumerate(((slice(0, 70), before[4]), (slice(70, 103), before[2] * 0))):
        want, states = ours.expected(tuple(t[at] for t in x), first)
        near(got[at], want)
        near(ours.cache.temporal[(4, 2)[n]], states[-1])
        if n == 0 and tracked:
            near(ours.cache.temporal[6], states[63])
            before[6] = ours.cache.temporal[6]
    before[[4, 2]] = ours.cache.temporal[[4, 2]]
    assert torch.equal(ours.cache.temporal, before)


def test_decoding_of_lightning(engine: SimpleNamespace) -> None:
    module = hooked(engine, "lightning", LIGHTNING)
    ours = Lightning(module, lightning_metadata([1] * 5, [4, -1, 2, 0, 0], [1] * 5))
    before = ours.cache.temporal.clone()
    x = tuple(torch.randn(5, H, S) for _ in range(3))
    got = ours.run("forward_decode", x)
    for n, slot in ((0, 4), (2, 2)):
        want, states = ours.expected(tuple(t[n : n + 1] for t in x), before[slot])
        near(got[n : n + 1], want)
        near(ours.cache.temporal[slot], states[-1])
        before[slot] = ours.cache.temporal[slot]
    assert torch.equal(ours.cache.temporal, before)


def test_drafts_of_lightning(engine: SimpleNamespace) -> None:
    module = hooked(engine, "lightning", LIGHTNING)
    ours = Lightning(module, lightning_metadata([DRAFTS] * 3, [4, -1, 2], [1, 1, 1]))
    before = ours.cache.temporal.clone()
    x = tuple(torch.randn(3 * DRAFTS, H, S) for _ in range(3))
    got = ours.run("forward_extend", x, verify=True)
    assert torch.equal(ours.cache.temporal, before)
    for n, slot in ((0, 4), (2, 2)):
        mine = slice(n * DRAFTS, (n + 1) * DRAFTS)
        want, states = ours.expected(tuple(t[mine] for t in x), before[slot])
        near(got[mine], want)
        near(ours.cache.intermediate_ssm[n], torch.stack(states))


def test_unlike_lightning_is_sglangs(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of drafts, and a backend of other functions."""
    module = sys.modules[LIGHTNING]
    monkeypatch.setattr(module, "seg_la_fwd", lambda *args, **options: "SGLang's")
    base = module.LightningAttentionBackend
    monkeypatch.setattr(
        base, "__init__", lambda self, _: setattr(self, "linear_backend", "minimax")
    )
    assert hooked(engine, "lightning", LIGHTNING).LightningAttentionBackend is not base
    q, meta = torch.randn(3, H, S), SimpleNamespace(mask=torch.ones(1))
    assert module.seg_la_fwd(q, q, q, q, q, meta) == "SGLang's"
    assert "mask:" in refused("LightningAttentionBackend.seg_la_fwd")
    module.LightningAttentionBackend(None)
    assert any("'minimax'" in why for _, why in report().not_replaced)
