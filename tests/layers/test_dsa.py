"""DSA beside transformers' DeepSeek V3.2 and GLM-MoE-DSA in float64: prompts, decoding in either
form, packed sequences, gradients; its options; attention to lists of latents."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.layers import DSA, MSA, QSA

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ("DeepseekV32", "GlmMoeDsa")
WIDE = torch.float64


def pair(kind: str, seed: int, mode: str | None = None) -> tuple[Any, DSA]:
    """Theirs and ours with the same weights, of random sizes."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip("transformers has no such model")
    draw = torch.Generator().manual_seed(seed)

    def of(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    width, H, rank, R = 8 * of(2, 3), of(1, 3, 4), of(5, 9), of(6, 16)
    nope, rope, v, HI = of(3, 8), of(2, 4), of(3, 8, 12), of(1, 2, 4)
    dim, topk = rope + of(0, 3), of(1, 5, 8)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=width,
        num_attention_heads=H,
        num_key_value_heads=H,
        q_lora_rank=rank,
        kv_lora_rank=R,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=v,
        index_topk=topk,
        index_head_dim=dim,
        index_n_heads=HI,
        num_hidden_layers=2,
        attention_bias=False,
        attn_implementation="eager",
    )
    theirs: Any = getattr(transformers, f"{kind}ForCausalLM")
    module = __import__(theirs.__module__, fromlist=["x"])
    torch.manual_seed(seed)
    theirs = getattr(module, f"{kind}Attention")(config, 0).double().eval()
    ours = (
        DSA(
            width,
            H,
            rank,
            topk,
            HI,
            dim,
            kind == "GlmMoeDsa",
            kv_lora_rank=R,
            nope_head_dim=nope,
            rope_head_dim=rope,
            v_head_dim=v,
            scale=theirs.scaling,
            mode=mode,
            norm_eps=theirs.kv_a_layernorm.variance_epsilon,
            rotary_base=config.rope_parameters["rope_theta"],
        )
        .double()
        .eval()
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter) + (parameter.dim() == 1))
    own = theirs.indexer
    weights = {
        "q_a_proj.weight": theirs.q_a_proj.weight,
        "q_norm": theirs.q_a_layernorm.weight,
        "q_proj.weight": theirs.q_b_proj.weight,
        "kv_a_proj.weight": theirs.kv_a_proj_with_mqa.weight,
        "kv_norm": theirs.kv_a_layernorm.weight,
        "kv_b_proj.weight": theirs.kv_b_proj.weight,
        "o_proj.weight": theirs.o_proj.weight,
        "index_q_proj.weight": own.wq_b.weight,
        "index_proj.weight": torch.cat([own.wk.weight, own.weights_proj.weight]),
        "index_k_norm.weight": own.k_norm.weight,
        "index_k_norm.bias": own.k_norm.bias,
    }
    ours.load_state_dict(weights)
    rotary = getattr(module, f"{kind}RotaryEmbedding")(config)

    def run(x: Tensor) -> Tensor:
        T = x.shape[1]
        places = torch.arange(T)[None].double()
        angles = places[..., None] * rotary.inv_freq.double()
        tables = torch.cat([angles, angles], -1)
        mask = torch.full((T, T), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        mask = mask.expand(len(x), 1, T, T)
        return theirs(x, (tables.cos(), tables.sin()), mask)[0]

    return run, ours


def inputs(ours: DSA, *shape: int) -> Tensor:
    return torch.randn(*shape, ours.o_proj.out_features, dtype=WIDE)


@pytest.fixture(autouse=True)
def _alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' choice of equal scores is the earlier one, and its scores are not rounded."""

    def topk(x: Tensor, k: int, dim: int = -1) -> Any:
        values, order = x.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), order.narrow(dim, 0, k)))

    monkeypatch.setattr(Tensor, "topk", topk)
    monkeypatch.setattr(Tensor, "float", lambda x: x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_prompts_and_gradients_match_transformers(kind: str, seed: int) -> None:
    theirs, ours = pair(kind, seed)
    x = inputs(ours, 2, 21).requires_grad_()
    want, got = theirs(x), ours(x)[0]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    weight = torch.randn_like(want)
    grads = [torch.autograd.grad(y, x, weight)[0] for y in (want, got)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [None, "chunk", "fused_recurrent"])
def test_pieces_and_steps_match_transformers(kind: str, mode: str | None) -> None:
    theirs, ours = pair(kind, 7, mode)
    x = inputs(ours, 2, 40)
    with torch.no_grad():
        y, state = ours(x[:, :9], use_cache=True)
        parts = [y]
        for a, b in [(9, 10), (10, 14), (14, 32), *((t, t + 1) for t in range(32, 36))]:
            y, state = ours(x[:, a:b], state=state, use_cache=True)
            parts.append(y)
        room = {n: s if n == "length" else torch.cat([s, s[:, :5]], 1) for n, s in state.items()}
        parts += [ours.step(x[:, t : t + 2], room) for t in (36, 38)]
        want = theirs(x)
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_match_transformers(kind: str) -> None:
    theirs, ours = pair(kind, 3)
    lengths = (5, 0, 1, 13)
    x = inputs(ours, 1, sum(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    got = ours(x, cu_seqlens=offsets)[0].split(lengths, 1)
    for y, part in zip(got, x.split(lengths, 1)):
        if part.shape[1]:
            torch.testing.assert_close(y, theirs(part), rtol=1e-6, atol=1e-6)


def test_absorbed_form_has_gradients() -> None:
    """As written out, to x and every weight but the indexer's."""
    _, ours = pair("DeepseekV32", 2)
    x, found = inputs(ours, 2, 12).requires_grad_(), []
    for mode in ("chunk", "fused_recurrent"):
        ours.mode = mode
        _, state = ours(x[:, :8], use_cache=True)
        y, _ = ours(x[:, 8:], state=state)
        leaves = [p for n, p in ours.named_parameters() if not n.startswith("index_")]
        found.append([y, *torch.autograd.grad(y.sin().sum(), [x, *leaves])])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)


def test_loss_is_that_of_written_out_heads() -> None:
    """The indexer's gradients, which come of absorbed queries."""
    _, ours = pair("DeepseekV32", 4)
    ours.train()
    ours.topk = 5
    x = inputs(ours, 2, 14)
    found = []
    for hooked in (False, True):
        if hooked:  # an adapter or a hook is not absorbed
            ours.kv_b_proj.register_forward_hook(lambda *_: None)
        ours.zero_grad()
        ours(x)[0].sum().backward()
        found.append([p.grad for n, p in ours.named_parameters() if n.startswith("index_")])
    assert all(g.abs().max() > 0 for g in found[0])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


def test_options_are_refused_by_name() -> None:
    for layer, (name, value) in product(
        (DSA, MSA, QSA), {"topk": 2.5, "index_dim": 0, "index_loss": "a"}.items()
    ):
        with pytest.raises((ValueError, TypeError), match=f"^{name}: want "):
            layer(32, **{name: value})
    with pytest.raises(ValueError, match=r"^index_loss: want 0 or more"):
        DSA(32, index_loss=-1.0)
    with pytest.raises(ValueError, match=r"^index_heads: want an integer"):
        DSA(32, index_heads=0)
    with pytest.raises(ValueError, match=r"^index_dim: want the 64"):
        DSA(32, index_dim=32)
    with pytest.raises(ValueError, match=r"^block: want one of"):
        QSA(32, 4, block=4.0)  # pyright: ignore[reportArgumentType]


def of_lists(page: int, lengths: list[int], N: int, P: int) -> tuple[Any, dict[str, Any], Tensor]:
    """Arguments of latent_attention, and the latents in rows."""
    B, T, R = len(lengths), 3, 6
    q, rows = torch.randn(B, T, 2, R + P, dtype=WIDE), torch.randn(B, 8, R + P, dtype=WIDE)
    selected = torch.randint(-1, 8, (B, T, N)).int()
    how: dict[str, Any] = {"width": R, "scale": 0.3, "selected": selected}
    latent = rows
    if page:
        order = torch.randperm(8 * B // page)
        latent = torch.full((len(order) + 1, page, R + P), torch.nan, dtype=WIDE)
        latent[order] = rows.view(-1, page, R + P)
        how["table"] = order.view(B, -1).int()
    return (q, latent, torch.tensor(lengths)), how, rows


@pytest.mark.parametrize("page", [0, 1, 4])
@pytest.mark.parametrize("N", [0, 1, 9])
@pytest.mark.parametrize("P", [0, 3])
def test_latent_attention_of_lists_matches_loop(page: int, N: int, P: int) -> None:
    torch.manual_seed(N)
    (q, latent, lengths), how, rows = of_lists(page, [7, 3, 1], N, P)
    want = torch.zeros(*q.shape[:3], 6, dtype=WIDE)
    for b, t in product(*map(range, q.shape[:2])):
        at = int(lengths[b]) - 3 + t
        keys = sorted({s for s in how["selected"][b, t].tolist() if 0 <= s <= at})
        if keys:
            p = (q[b, t] @ rows[b, keys].mT * 0.3).softmax(-1)
            want[b, t] = p @ rows[b, keys, :6]
    q.requires_grad_()
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(ops.latent_attention(q, latent, lengths, **how), want)


def test_latent_attention_of_lists_has_gradients() -> None:
    (q, latent, lengths), how, _ = of_lists(0, [7, 3], 5, 2)
    leaves = [q.requires_grad_(), latent.requires_grad_()]
    torch.autograd.gradcheck(lambda q, x: ops.latent_attention(q, x, lengths, **how), leaves)


def test_latent_attention_refuses_lists() -> None:
    (q, latent, lengths), how, _ = of_lists(0, [7, 3], 5, 2)
    selected = how.pop("selected")
    for wrong, error, text in (
        (selected.long(), TypeError, "want int32"),
        (selected[..., None], ValueError, "want 3 dimensions"),
        (selected[:, :1], ValueError, "want shape"),
        (selected.clamp(min=8), ValueError, "want less than the 8 keys"),
    ):
        with pytest.raises(error, match=f"^selected: {text}"):
            ops.latent_attention(q, latent, lengths, selected=wrong, **how)
