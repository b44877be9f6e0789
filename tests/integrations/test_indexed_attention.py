"""Models whose attention an indexer restricts, and models with hyper-connections, patched beside
themselves."""

import copy
import inspect
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers

from slipstream import layers, ops
from slipstream.integrations import class_mixers, hyper_connections, indexed_attention, usage
from slipstream.integrations.masks import is_rule_mask
from slipstream.integrations.patching import ORIGINAL
from slipstream.integrations.transformers import patch, train_indexers, unpatch
from slipstream.layers import MSA, QSA
from tests.support.linear_models import tiny
from tests.support.tiny_models import build

pytestmark = pytest.mark.filterwarnings("ignore")
# what a list is short of with these
SIZES: dict[str, dict[str, Any]] = {
    "DeepseekV32ForCausalLM": {"index_topk": 5, "num_hidden_layers": 1},
    "GlmMoeDsaForCausalLM": {
        "index_topk": 5, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "shared"],
    },
    "Glm5NextForConditionalGeneration": {
        "index_topk": 8, "index_kpool": 4, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "shared"], "mlp_layer_types": ["dense"] * 3,
    },
    "Qwen4ExpForCausalLM": {"indexer_budget": 8, "indexer_compress_ratio": 4},
    "MiniMaxM3VLForCausalLM": {
        "layer_types": ["minimax_m3_sparse", "full_attention"], "index_n_heads": 2,
        "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 2,
    },
}  # fmt: skip
MODELS = [x for x in SIZES if hasattr(transformers, x)]
LENGTHS = (13, 2, 11)
every_model = pytest.mark.parametrize("name", MODELS)
IDS = torch.randint(1, 30, (2, 26), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' choice of equal scores is the earlier one, as ours."""

    def topk(x: Tensor, k: int, dim: int = -1) -> Any:
        values, order = x.sort(dim=dim, descending=True, stable=True)
        kept = torch.return_types.topk((values.narrow(dim, 0, k), order.narrow(dim, 0, k)))
        return kept

    monkeypatch.setattr(Tensor, "topk", topk)


def model_of(name: str, impl: str = "sdpa", **more: Any) -> Any:
    cls, config, *_ = tiny(name)
    config = copy.deepcopy(config)
    text, given = config.get_text_config(), SIZES[name] | more
    if "deepseek_sparse_attention" in (getattr(text, "layer_types", None) or ()):  # 5.17's name
        types = [x.replace("indexed", "deepseek_sparse") for x in given.get("layer_types", ())]
        given |= {"layer_types": types} if types else {}
    for key, value in given.items():
        setattr(text, key, value)
    torch.manual_seed(0)
    model = build(cls, config, impl, None)
    with torch.no_grad():  # norms' weights are zeros or ones, which hide their place
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def with_gradients(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    logits = model(**inputs, use_cache=False).logits
    loss = (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum()
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
    return logits.detach(), dict(zip(parameters, grads))


def expect_alike(got: Any, want: Any, rows: Any = slice(None)) -> None:
    assert_near(got[0][rows], want[0][rows])
    top = max(float(g.abs().max()) for g in want[1].values() if g is not None)
    for parameter, grad in want[1].items():
        found = got[1][parameter]
        assert (grad is None) == (found is None), parameter
        if grad is not None:
            torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-4 * top, msg=parameter)


def assert_near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@every_model
@pytest.mark.parametrize("impl", ["sdpa", "eager", "slipstream"])
def test_logits_and_gradients_equal_transformers(
    name: str, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name).train()
    want = with_gradients(model, input_ids=IDS)
    lists: list[Tensor] = []
    run = indexed_attention.index

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        lists.append(run(*args, **kwargs))
        return lists[-1]

    monkeypatch.setattr(indexed_attention, "index", counted)
    patch(model)
    model.set_attn_implementation(impl)
    expect_alike(with_gradients(model, input_ids=IDS), want)
    assert len(lists) == 1
    # lists are full, and not all that there is
    blocks = IDS.shape[1] // 4
    assert (lists[0][:, -1] >= 0).all() and lists[0].shape[-1] < blocks


@every_model
@pytest.mark.parametrize("told", ["positions", "offsets"])
def test_packed_sequences_equal_separate(name: str, told: str) -> None:
    model = model_of(name).train()
    rows = IDS[:1]
    alone = [with_gradients(model, input_ids=x) for x in rows.split(LENGTHS, 1)]
    patch(model)
    given: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    if told == "offsets":
        cuts = torch.tensor((0, *LENGTHS)).cumsum(0).int()
        given |= {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}
    got = model(input_ids=rows, use_cache=False, **given).logits
    assert_near(got, torch.cat([x for x, _ in alone], 1))


@every_model
def test_padding_equals_rows_without(name: str) -> None:
    model = model_of(name)
    with torch.no_grad():
        want = model(input_ids=IDS[1:, 5:]).logits
        patch(model)
        for side in ("left", "right"):
            ids, mask = IDS.clone(), torch.ones_like(IDS)
            ids[1] = torch.cat([IDS[1, :5], IDS[1, 5:]]) if side == "left" else IDS[1].roll(-5)
            mask[1, : 5 if side == "left" else 0] = 0
            mask[1, 26 if side == "left" else 21 :] = 0
            got = model(input_ids=ids, attention_mask=mask).logits[1:]
            assert_near(got[:, 5:] if side == "left" else got[:, :21], want)


@every_model
def test_prompts_and_tokens_by_cache_equal_whole(name: str) -> None:
    """Prompts in parts, then token by token, over more than a block."""
    model = model_of(name)
    with torch.no_grad():
        want = model(input_ids=IDS).logits
        patch(model)
        found, kept = [], {}
        for begin, end in ((0, 9), (9, 14), *((n, n + 1) for n in range(14, 26))):
            out = model(input_ids=IDS[:, begin:end], use_cache=True, **kept)
            kept = {x: out[x] for x in ("cache", "past_key_values") if x in out}
            found.append(out.logits)
    assert_near(torch.cat(found, 1), want)
    ends = tuple(indexed_attention.FORWARDS)
    places = [x for x in usage.report().rows if x.name.endswith(ends)]
    assert any(x.calls for x in places) and not any(x.refused for x in places)


@every_model
def test_generate_from_padded_prompts_equals_transformers(name: str) -> None:
    """Steps behind padding are transformers' own, on the cache that ours has filled."""
    if name == "MiniMaxM3VLForCausalLM":
        pytest.skip("transformers' own blocks begin with the padding")
    model = model_of(name)
    mask = torch.ones_like(IDS)
    mask[1, :6] = 0
    options: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    want = model.generate(IDS, attention_mask=mask, **options)
    patch(model)
    assert torch.equal(model.generate(IDS, attention_mask=mask, **options), want)


@pytest.mark.parametrize("name", [x for x in MODELS if "Dsa" in x or "V32" in x])
def test_no_mask_has_entries_where_lists_are_read(name: str) -> None:
    """But for steps behind padding, which are transformers' own."""
    model = model_of(name)
    patch(model)
    model.set_attn_implementation("slipstream")
    (first, *_) = (x for x in model.modules() if type(x).__name__ in indexed_attention.FORWARDS)
    seen: list[bool] = []

    def look(_: Any, args: Any, kwargs: Any) -> None:
        seen.append(is_rule_mask(kwargs["attention_mask"]))

    first.register_forward_pre_hook(look, with_kwargs=True)
    mask = torch.ones_like(IDS)
    mask[1, :6] = 0
    for given in ({}, {"attention_mask": mask}):
        model.generate(IDS, max_new_tokens=2, min_new_tokens=2, do_sample=False, **given)
    assert seen == [True, True, True, False]
    with pytest.raises(RuntimeError, match=r"^output_attentions: .*attn_implementation='eager'"):
        model(input_ids=IDS, output_attentions=True)
    unpatch()
    model(input_ids=IDS)
    assert not seen[-1]


def test_classes_are_those_that_class_mixers_have() -> None:
    assert indexed_attention.FORWARDS.items() <= class_mixers.FORWARDS.items()


@every_model
def test_trained_indexers_change_nothing_but_their_gradients(name: str) -> None:
    """And a few steps make the loss smaller."""
    model = model_of(name).train()
    patch(model)
    want = with_gradients(model, input_ids=IDS)
    assert train_indexers(model) == 1
    got = with_gradients(model, input_ids=IDS)
    own = {x for x in want[1] if ".indexer." in x}
    assert own and all(want[1][x] is None for x in own)
    assert all(got[1][x] is not None for x in own)
    others = [(y[0], {x: g for x, g in y[1].items() if x not in own}) for y in (got, want)]
    expect_alike(*others)
    indexer = next(x.indexer for x in model.modules() if getattr(x, "indexer", None) is not None)
    optimizer, losses = torch.optim.Adam(indexer.parameters(), 1e-2), []
    for _ in range(12):
        model(input_ids=IDS, use_cache=False).logits.sum().backward()
        losses.append(float(indexer.index_loss))
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < losses[-1] < 0.9 * losses[0]
    train_indexers(model, 0.0)
    assert all(with_gradients(model, input_ids=IDS)[1][x] is None for x in own)
    with pytest.raises(ValueError, match="weight: want 0 or more"):
        train_indexers(model, -1.0)


@every_model
def test_blocks_of_two_run_as_before(name: str) -> None:
    sizes = {"Q": "indexer_compress_ratio", "M": "index_block_size"}
    size = sizes.get(name[0], "index_kpool")
    model = model_of(name, "sdpa", **{size: 2})
    want = with_gradients(model, input_ids=IDS)
    patch(model)
    expect_alike(with_gradients(model, input_ids=IDS), want)


STREAMED = [
    name
    for name in (
        "DeepseekV4ForCausalLM", "Glm5NextForConditionalGeneration", "HYV4ForCausalLM",
        "HYV4VLForConditionalGeneration", "Qwen4ExpForCausalLM",
    )
    if hasattr(transformers, name)
]  # fmt: skip


def test_every_class_with_a_forward_is_tested() -> None:
    """And is replaced: a release whose layers do more would keep its own."""
    patch()
    known = set()
    for name in STREAMED:
        found = vars(inspect.getmodule(getattr(transformers, name)))
        classes = [found[x] for x in hyper_connections.FORWARDS if x in found]
        assert classes, name
        known |= {x.__name__ for x in classes}
        assert all(hasattr(x.forward, ORIGINAL) for x in classes), name
    if len(STREAMED) == 5:
        assert known == {*hyper_connections.FORWARDS}
    unpatch()
    assert not any(hasattr(x.forward, ORIGINAL) for x in classes)


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_models_equal_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, config, weights, inputs, _ = tiny(name)
    vars(config.get_text_config()).update(hc_eps=0.02, rms_norm_eps=0.1, hc_sinkhorn_iters=3)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :4] = 0
    pre, post = Mock(wraps=ops.mhc_pre), Mock(wraps=ops.mhc_post)
    monkeypatch.setattr(hyper_connections, "mhc_pre", pre)
    monkeypatch.setattr(hyper_connections, "mhc_post", post)

    def by_position(layer: Any, args: Any, kwargs: Any) -> Any:
        bound = inspect.signature(layer.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def run() -> tuple[Tensor, dict[str, Tensor | None]]:
        model = build(cls, config, "eager", weights).train()
        *_, last = (x for x in model.modules() if type(x).__name__ in hyper_connections.FORWARDS
                    and type(x).__name__.endswith("Layer"))  # fmt: skip
        last.register_forward_pre_hook(by_position, with_kwargs=True)
        logits = model(**inputs, attention_mask=mask, use_cache=False).logits[mask.bool()]
        loss = (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum()
        parameters = dict(model.named_parameters())
        grads = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
        return logits.detach(), dict(zip(parameters, grads))

    want, right = run()
    if not all(g is None or g.isfinite().all() for g in right.values()):
        pytest.skip("transformers 5.17's own gradients are not finite")
    assert not pre.called and not post.called
    patch()
    got, ours = run()
    layers = config.get_text_config().num_hidden_layers
    assert post.call_count == 2 * layers
    head = 0 if "Glm5Next" in name else 1  # a mean
    assert pre.call_count == (0 if "Qwen4" in name else 2 * layers + head)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    largest = max(float(g.abs().max()) for g in right.values() if g is not None)
    for parameter, grad in right.items():
        assert (grad is None) == (ours[parameter] is None), parameter
        if grad is not None:
            torch.testing.assert_close(
                ours[parameter], grad, rtol=1e-3, atol=1e-4 * largest, msg=parameter
            )


@pytest.mark.parametrize("name", [x for x in STREAMED if "Qwen4" not in x])
def test_layers_take_state_dicts_of_transformers(name: str) -> None:
    cls, config, weights, _, _ = tiny(name)
    model = build(cls, config, "eager", weights)
    parts = {type(x).__name__.partition("Hyper")[2]: x for x in model.modules()}
    text = config.get_text_config()
    N, D = text.hc_mult, text.hidden_size
    streams = torch.randn(2, 3, N, D)
    alone = "HYV4" in name
    ours = layers.HyperConnection(
        D, N, mix=not alone, eps=text.hc_eps, norm_eps=text.rms_norm_eps,
        **({"magnitude": text.hc_magnitude, "post_eps": text.hc_eps} if alone
           else {"iterations": text.hc_sinkhorn_iters}),
    )  # fmt: skip
    ours.load_state_dict(parts["Connection"].state_dict())
    *want, collapsed = parts["Connection"](streams)
    for got, right in zip(ours(streams), (collapsed, *want)):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
    if parts["Head"].state_dict():
        head = layers.HyperHead(D, N, eps=text.hc_eps, norm_eps=text.rms_norm_eps)
        head.load_state_dict(parts["Head"].state_dict())
        torch.testing.assert_close(head(streams), parts["Head"](streams), rtol=1e-5, atol=1e-5)


def loaded(attention: Any, base: float, rotary_dim: int) -> QSA | MSA:
    """QSA or MSA with the weights of one of theirs."""
    own, config = attention.indexer, attention.config
    sizes: dict[str, Any] = {
        "num_heads": config.num_attention_heads,
        "qk_norm": "zero_centered_rms",
    }
    sizes |= {"num_kv_heads": config.num_key_value_heads, "head_dim": attention.head_dim}
    sizes |= {"rotary_dim": rotary_dim, "rotary_base": base, "norm_eps": config.rms_norm_eps}
    q, (k, v) = attention.q_proj.weight, (attention.k_proj.weight, attention.v_proj.weight)
    if hasattr(own, "index_qk_proj"):
        sizes |= {"block": own.compress_ratio, "topk": own.block_topk, "output_gate": True}
        sizes |= {"index_heads": own.index_n_heads, "index_dim": own.index_head_dim}
        layer: QSA | MSA = QSA(config.hidden_size, **sizes)
        q, gate = q.unflatten(0, (sizes["num_heads"], 2, -1)).unbind(1)
        gates = {"g_proj.weight": gate.flatten(0, 1)}
        norms, projections = (own.q_layernorm, own.k_layernorm), own.index_qk_proj.weight
        q = q.flatten(0, 1)
    else:
        sizes |= {"block": own.block_size, "topk": own.topk_blocks, "local": own.local_blocks}
        layer, gates = MSA(config.hidden_size, index_dim=own.head_dim, **sizes), {}
        projections = torch.cat([own.q_proj.weight, own.k_proj.weight])
        norms = own.q_norm, own.k_norm
    weights = {"qkv_proj.weight": torch.cat([q, k, v]), "o_proj.weight": attention.o_proj.weight}
    weights |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight, **gates}
    weights |= {"index_q_norm": norms[0].weight, "index_k_norm": norms[1].weight}
    layer.load_state_dict(weights | {"index_proj.weight": projections})
    return layer


@pytest.mark.parametrize("name", [x for x in MODELS if x[0] in "QM"])
@torch.no_grad()
def test_layers_equal_those_of_transformers(name: str) -> None:
    model = model_of(name, "eager").eval()
    (first, *_) = (x for x in model.modules() if getattr(x, "indexer", None) is not None)
    (tables, *_) = (x for n, x in model.named_modules() if n.endswith("rotary_emb"))
    T, width = 37, first.config.hidden_size
    x, places = torch.randn(2, T, width), torch.arange(T)[None]
    cos, sin = tables(x, places.expand(3, 2, -1) if "Qwen4" in name else places.expand(2, -1))
    mask = torch.full((2, 1, T, T), torch.finfo(x.dtype).min).triu(1)
    want = first(x, (cos, sin), mask, position_ids=places)[0]
    base = float(first.config.rope_parameters["rope_theta"])
    layer = loaded(first, base, cos.shape[-1])
    got, state = layer(x[:, :20], use_cache=True)
    rest, _ = layer(x[:, 20:], state=state, use_cache=True)
    torch.testing.assert_close(torch.cat([got, rest], 1), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x)[0], want, rtol=1e-4, atol=1e-5)
