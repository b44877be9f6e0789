"""Models whose mixers are classes with loops of their own, patched, beside transformers' own
functions in float64 on each sequence alone and whole; calls on a cache, beside one of all
tokens."""

import gc
import inspect
import io
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers

from slipstream.integrations import class_mixers, indexed_attention, linear_mixers
from slipstream.integrations.linear_mixers import running
from slipstream.integrations.patching import CACHES
from slipstream.integrations.rows import rows_of
from slipstream.integrations.transformers import NAME, patch, unpatch
from tests.support.linear_models import linear_classes, next_cache, own_cache, tiny
from tests.support.tiny_models import build

pytestmark = pytest.mark.filterwarnings("ignore")
CLASSES = (
    "MiniMaxForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "ZayaForCausalLM",
    "xLSTMForCausalLM",
)  # fmt: skip
PADDED = {"left": slice(0, 4), "right": slice(-4, None), "within": slice(4, 7)}


def _models(name: str) -> tuple[Any, Any, Tensor]:
    """Patched, the same in float64 for transformers' own functions, and tokens [2, 12]. The second
    is called by _exactly alone, for a patch holds for all models."""
    cls, config, weights, inputs, _ = tiny(name)
    exact = build(cls, config, "sdpa" if cls._supports_sdpa else "eager", weights).double()
    exact.set_experts_implementation("eager")  # others take no float64
    patch()
    return build(cls, config, NAME, weights), exact, inputs["input_ids"]


def _exactly(model: Any, ids: Tensor) -> Tensor:
    """Logits of transformers' own functions."""
    unpatch()
    logits = model(ids, use_cache=False).logits
    patch()
    return logits


def _assert_near(got: Tensor, want: Tensor) -> None:
    want = want.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_every_class_with_a_forward_is_tested() -> None:
    sources = "".join(
        inspect.getsource(inspect.getmodule(getattr(transformers, x))) for x in CLASSES
    )
    own = class_mixers.FORWARDS.keys() - indexed_attention.FORWARDS.keys()  # of another test
    assert all(f"class {x}(" in sources for x in own)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CLASSES)
def test_padded_rows_equal_rows_alone(name: str, side: str) -> None:
    """Logits and gradients, with positions or without."""
    model, exact, ids = _models(name)
    mask = torch.ones_like(ids)
    mask[1, PADDED[side]] = 0
    live = mask.bool()
    weights = torch.randn(
        model(ids, use_cache=False).logits.shape, generator=torch.Generator().manual_seed(5)
    )
    want = [_exactly(exact, ids[:1]), _exactly(exact, ids[1:, live[1]])]
    sum((x * w).sum() for x, w in zip(want, (weights[:1], weights[1:, live[1]]))).backward()
    for options in ({}, {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}):
        model.zero_grad()
        got = model(ids, attention_mask=mask, use_cache=False, **options).logits
        _assert_near(got[:1], want[0])
        _assert_near(got[1:, live[1]], want[1])
        (got * weights)[live].sum().backward()
        largest = max(float(p.grad.abs().max()) for p in exact.parameters() if p.grad is not None)
        for (n, p), q in zip(model.named_parameters(), exact.parameters()):
            if q.grad is not None:
                torch.testing.assert_close(
                    p.grad.double(), q.grad, rtol=1e-3, atol=1e-4 * largest, msg=n
                )


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_beside_a_cache(name: str) -> None:
    """transformers' own of RWKV and xLSTM write into what their backward reads."""
    model, _, ids = _models(name)
    grads = []
    for use_cache in (False, True):
        loss = model(ids, use_cache=use_cache).logits.square().sum()
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads.append(torch.autograd.grad(loss, parameters, allow_unused=True))
    for without, beside in zip(*grads):
        assert (without is None) == (beside is None)
        if without is not None:
            torch.testing.assert_close(beside, without)


@pytest.mark.parametrize("side", [None, *PADDED])
@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_pieces_of_padded_prompts_equal_rows_alone(name: str, side: str | None) -> None:
    """Pieces of several tokens and of one behind padding on any side, and in its middle."""
    model, exact, ids = _models(name)
    mask = torch.ones_like(ids)
    if side is not None:
        mask[1, {"left": slice(0, 3), "right": slice(3, 6), "within": slice(5, 8)}[side]] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    parts, cache = [], own_cache(model)
    for begin, end in ((0, 6), (6, 10), (10, 11), (11, 12)):
        given = {"position_ids": positions[:, begin:end], "use_cache": True, **cache}
        if side is not None:
            given["attention_mask"] = mask[:, :end]
        out = model(ids[:, begin:end], **given)
        cache = next_cache(out, cache)
        parts.append(out.logits)
    got, live = torch.cat(parts, 1), mask[1].bool()
    _assert_near(got[:1], _exactly(exact, ids[:1]))
    _assert_near(got[1:, live], _exactly(exact, ids[1:, live]))


@pytest.mark.parametrize("name", [x for x in CLASSES if x != "RwkvForCausalLM"])  # a list
@torch.no_grad()
def test_cache_that_was_reset_is_as_new(name: str) -> None:
    model, _, ids = _models(name)
    mask = torch.ones_like(ids)
    mask[1, PADDED["left"]] = 0
    out = model(ids, attention_mask=mask, use_cache=True, **own_cache(model))
    cache = next_cache(out, own_cache(model))
    for held in cache.values():
        held.reset()
        for layer in getattr(held, "layers", ()):
            if getattr(layer, "keys", None) is not None and layer.get_seq_length() > 0:
                pytest.skip("softmax layers of transformers 5.17 keep their tokens, as zeros")
    again = model(ids, attention_mask=mask, use_cache=True, **cache)
    assert torch.equal(again.logits[mask.bool()], out.logits[mask.bool()])


@pytest.mark.parametrize("given", ["attention_mask", "seq_idx", "both"])
@torch.no_grad()
def test_compiled_layers_know_padding_and_sequences(given: str) -> None:
    """RG-LRU and softmax attention, where a graph breaks within a layer, too."""
    torch.compiler.reset()
    model, _, ids = _models("RecurrentGemmaForCausalLM")
    real, seq_idx = torch.ones_like(ids), (torch.arange(24).view(2, 12) // 5).int()
    real[1, PADDED["left"]] = 0
    both = {"attention_mask": real, "seq_idx": seq_idx}
    options: Any = both if given == "both" else {given: both[given]}
    live = options.get("attention_mask", torch.ones_like(ids)).bool()
    numbers = options.get("seq_idx", torch.zeros_like(ids))
    each = [(i, live[i] & (numbers[i] == n)) for i in range(2) for n in numbers[i].unique()]
    alone = [model(ids[i : i + 1, at], use_cache=False).logits[0] for i, at in each if at.any()]
    _assert_near(model(ids, use_cache=False, **options).logits[live], torch.cat(alone))
    compiled = torch.compile(model, backend="eager")
    _assert_near(compiled(ids, use_cache=False, **options).logits[live], torch.cat(alone))
    linear = next(x for x in model.modules() if isinstance(x, torch.nn.Linear))
    linear.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    _assert_near(compiled(ids, use_cache=False, **options).logits[live], torch.cat(alone))


@torch.no_grad()
def test_states_of_a_mixer_end_with_it() -> None:
    """A mixer of another model may have the id of one that is gone; a copy of a cache, or one that
    was saved, goes on in the same model or in a copy of it."""
    model, _, ids = _models("RecurrentGemmaForCausalLM")
    ((name, cache),) = own_cache(model).items()
    model(ids, use_cache=True, **{name: cache})
    states, other, file = cache.slipstream_states, deepcopy(cache), io.BytesIO()
    assert len(states) > 1 and len(other.slipstream_states) == len(states)
    saved = deepcopy(other)
    if "get_seq_length" not in vars(other):  # a method that 5.17 gives it, which no file holds
        torch.save(other, file)
        saved = deepcopy(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
    token = {"input_ids": ids[:, :1], "use_cache": True}
    swapped = torch.tensor([1, 0])
    for x in (cache, other, saved):
        x.reorder_cache(swapped)
    again = deepcopy(model)
    for _ in range(2):
        want = model(**token, **{name: cache}).logits
        assert torch.equal(model(**token, **{name: other}).logits, want)
        assert torch.equal(again(**token, **{name: saved}).logits, want)
    del model
    gc.collect()
    assert not any(key() for key in states)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_generated_tokens_equal_those_without_a_cache(name: str, beams: int) -> None:
    """Of two rows, one of them padded, by a search that moves beams between rows."""
    model, exact, ids = _models(name)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": beams}
    options |= {"return_dict_in_generate": True, "output_logits": True, "disable_compile": True}
    generate = {"attention_mask": mask, "output_scores": True, **options}
    got = model.generate(ids, use_cache=True, **generate)
    want = model.generate(ids, use_cache=False, **generate)
    assert torch.equal(got.sequences, want.sequences)
    for x, y in zip(got.logits, want.logits):
        _assert_near(x, y)
    if beams > 1:
        moved = torch.cat([x[:1] for x in got.beam_indices.split(1)])
        assert bool((moved[:, 1:] != moved[:, :-1]).any()), "no beam moved"
    tokens = got.sequences[1:, 3:-1]
    last = _exactly(exact, tokens)[0, -1].argmax()
    assert beams > 1 or last == got.sequences[1, -1]


@pytest.mark.parametrize("positions", [True, False])
@torch.no_grad()
def test_minimax_of_states_first_counts_its_keys(positions: bool) -> None:
    """transformers asks the first layer, which has no keys, how many a mask and positions count."""
    cls, config, _, inputs, _ = tiny("MiniMaxForCausalLM")
    config.num_hidden_layers = 3
    config.layer_types = ["linear_attention", "full_attention", "linear_attention"]
    patch()
    model, ids = build(cls, config, NAME, None), inputs["input_ids"]
    for p in model.parameters():
        if p.dim() > 1:
            p.normal_(0, 0.3)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    given = {"position_ids": mask.cumsum(1).sub(1).clamp(min=0)} if positions else {}
    want = model(ids, use_cache=False, **given, **({"attention_mask": mask} if positions else {}))
    cache, got = None, []
    for a, b in ((0, 7), (7, 8), (8, 12)):
        part = {name: x[:, a:b] for name, x in given.items()}
        part |= {"attention_mask": mask[:, :b]} if positions else {}
        out = model(ids[:, a:b], use_cache=True, past_key_values=cache, **part)
        cache = out.past_key_values
        got.append(out.logits)
    live = mask.bool() | (not positions)
    _assert_near(torch.cat(got, 1)[live], want.logits[live])


@pytest.mark.parametrize("shift", [-12.0, 0.0, 12.0])
def test_mlstm_of_strong_gates(shift: float) -> None:
    """Outputs, states and gradients, where the running maximum is far from 0, and eps counts."""
    module = inspect.getmodule(transformers.xLSTMForCausalLM)
    config = transformers.xLSTMConfig(chunk_size=14)  # no rest, which would be in float32
    backend = module.xLSTMBackend(config)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    B, H, T, K, V = 2, 2, 70, 8, 6
    given = {"query": normal(B, H, T, K), "key": normal(B, H, T, K), "value": normal(B, H, T, V)}
    given |= {"igate": normal(B, H, T), "fgate": normal(B, H, T)}
    given |= {"c_initial": normal(B, H, K, V), "n_initial": normal(B, H, K)}
    scaled = given | {"igate": given["igate"] * 3 + shift, "fgate": given["fgate"] * 6}
    scaled["m_initial"] = normal(B, H, 1).detach()
    results = []
    for forward in (module.xLSTMBackend.forward, class_mixers.mlstm):
        h, states = forward(backend, **scaled)
        loss = (h * torch.linspace(-1, 1, h.numel(), dtype=h.dtype).view(h.shape)).sum()
        results.append(
            (h, *states, *torch.autograd.grad(loss, [*given.values()], retain_graph=True))
        )
    for want, got in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9 * float(want.abs().max()))


def test_rows_pack_tokens_and_states() -> None:
    """Rows of several sequences with padding within, before and behind; one is padding alone."""
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6, [0, 0, 0, 1, 1, 1]]).int()
    real = torch.tensor([[0, 1, 1, 0, 1, 1], [0] * 6, [1, 1, 1, 1, 0, 0]]).bool()
    x = torch.arange(18.0).view(3, 6)
    state = torch.tensor([10.0, 20.0, 30.0])
    running.now.real_of_layer = real
    try:
        rows = rows_of({"seq_idx": seq_idx}, x)
    finally:
        running.now.real_of_layer = None
    assert torch.equal(rows.unpack(rows.pack(x)), x)
    cuts = rows.cuts.tolist()
    packed = [rows.pack(x)[0, i:j].tolist() for i, j in pairwise(cuts)]
    assert packed[:6] == [[1.0], [2.0, 4.0], [5.0], [], [12.0, 13.0, 14.0], [15.0]]
    assert sorted(packed[6]) == [0.0, 3.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 16.0, 17.0]
    assert rows.enter(state, -1.0).tolist() == [10.0, -1.0, -1.0, 20.0, 30.0, -1.0, -1.0]
    assert rows.leave(torch.arange(7)).tolist() == [2, 3, 5]
    plain = rows_of({}, x)
    assert plain.cuts is None and plain.pack(x) is x and plain.enter(state) is state
    with pytest.raises(ValueError, match="seq_idx"):
        rows_of({"seq_idx": seq_idx}, x[:, :5])


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_follow_what_is_written_into_a_tensor(inference: bool, packed: bool) -> None:
    """As a loop does that keeps one tensor for all of its batches."""
    with torch.inference_mode(inference):
        given = torch.arange(8).view(1, 8) // 3
        given, x = given if packed else given > 0, torch.arange(8.0).view(1, 8)
        for begin in (3, 5):
            given.copy_(torch.arange(8) // begin)
            rows = rows_of({"seq_idx": given} if packed else {}, x, None if packed else given)
            assert int(rows.cuts[1]) == (begin if packed else 8 - begin)
            if packed:
                assert int(linear_mixers.offsets_of(given)[1]) == begin


# Mamba-1 with one scan, with norms, in a hybrid, and with a scan for each head; Mamba-2 whose
# limits of dt have either name
SAMPLE = (
    "FalconMambaForCausalLM", "JambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM",
    "NemotronHForCausalLM", "ZambaForCausalLM", "Zamba2ForCausalLM",
)  # fmt: skip
# of which the indexer of transformers' own chooses other keys
NOT_ALIKE = ("Qwen4ExpForCausalLM",)


def _limited(config: Any) -> Any:
    """dt is clamped at most tokens."""
    for each in (config, config.get_text_config()):
        if hasattr(each, "time_step_limit"):
            each.time_step_limit = (0.5, 0.7)
        if hasattr(each, "time_step_min"):
            each.time_step_min = 0.6
    return config


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *SAMPLE,
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in linear_classes()
            if x not in (*SAMPLE, *NOT_ALIKE)
        ),
    ],
)
@torch.no_grad()
def test_calls_on_a_cache_equal_one(name: str, masked: bool) -> None:
    """Of several tokens and of one; masked: with a mask as long as the text, padded on the left."""
    cls, config, weights, inputs, _ = tiny(name)
    patch()
    model = build(cls, _limited(config), NAME, weights)
    ids = inputs["input_ids"]
    mask = torch.ones_like(ids)
    if masked:
        mask[1, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def run(begin: int, end: int, cache: dict[str, Any]) -> Any:
        options: dict[str, Any] = {"position_ids": positions[:, begin:end], **cache}
        if masked:
            options["attention_mask"] = mask[:, :end]
        return model(ids[:, begin:end], use_cache=True, **options)

    want = run(0, ids.shape[1], {}).logits[mask.bool()]
    parts, cache = [], own_cache(model)
    for begin, end in ((0, 4), (4, 7), (7, 8), (8, 9), (9, ids.shape[1])):
        out = run(begin, end, cache)
        cache = next_cache(out, cache)
        parts.append(out.logits)
    got = torch.cat(parts, 1)[mask.bool()]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("patched", [False, True])
@torch.no_grad()
def test_one_row_caches_are_expanded_first(patched: bool) -> None:
    """transformers' models refuse two prompts behind a cache of one row, patched or not, and take
    them once batch_repeat_interleave has repeated it. Its layers for states have no such method."""
    cls, config, weights, inputs, _ = tiny("Lfm2ForCausalLM")
    if patched:
        patch()
    model = build(cls, config, NAME if patched else "sdpa", weights)
    ids = inputs["input_ids"].clone()
    ids[:, :5] = ids[:1, :5]
    prefix = model(ids[:1, :5], use_cache=True)
    word = next(x for x in CACHES if x in prefix)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        model(ids[:, 5:], **{word: prefix[word]})
    cache = model(ids[:1, :5], use_cache=True)[word]
    cache.batch_repeat_interleave(2)
    got, want = model(ids[:, 5:], **{word: cache}).logits, model(ids).logits[:, 5:]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
