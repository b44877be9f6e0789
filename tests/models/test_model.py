"""Properties of the language model: every mixer, a hybrid of some, and other parts of blocks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, StateCache
from slipstream.models.cache import CACHE
from tests.support.language_models import MODELS, PARTS, VOCAB, assert_same, model, tokens

every_model = pytest.mark.parametrize("name", [*MODELS, *PARTS])


@every_model
@torch.no_grad()
def test_model_incremental_equals_full(name: str) -> None:
    m, ids = model(name), tokens(2, 13)
    full = m(ids).logits
    out = m(ids[:, :5], use_cache=True)
    parts, cache = [out.logits], out.past_key_values
    for begin, end in ((5, 6), (6, 7), (7, 11), (11, 12), (12, 13)):
        out = m(ids[:, begin:end], past_key_values=cache, use_cache=True)
        parts.append(out.logits)
    assert cache.get_seq_length() == 13
    assert_same(torch.cat(parts, 1), full)


@every_model
@torch.no_grad()
def test_model_padded_equals_unpadded(name: str) -> None:
    m, lengths, width = model(name), (9, 4, 1), 9
    for side in ("left", "right"):
        ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
        rows = []
        for row, n in enumerate(lengths):
            at = slice(width - n, None) if side == "left" else slice(0, n)
            rows.append((at, tokens(1, n, seed=n)))
            ids[row, at], mask[row, at] = rows[-1][1][0], 1
        logits = m(ids, attention_mask=mask).logits
        for row, (at, alone) in enumerate(rows):
            assert_same(logits[row, at], m(alone).logits[0])


@every_model
@torch.no_grad()
def test_model_padded_one_token_at_a_time(name: str) -> None:
    """A row may have its padding anywhere: another goes on meanwhile."""
    m, mask = model(name), torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 0, 1]])
    ids = tokens(2, 5)
    short = ids[1:, mask[1].bool()]
    cache, found = StateCache(len(m.model.layers)), []
    for t in range(5):
        seen = mask[:, : t + 1] if t % 2 else mask[:, t : t + 1]
        found.append(m(ids[:, t : t + 1], attention_mask=seen, cache=cache).logits)
    logits = torch.cat(found, 1)
    assert_same(logits[0], m(ids[:1]).logits[0])
    assert_same(logits[1, mask[1].bool()], m(short).logits[0])


@every_model
@torch.no_grad()
def test_model_packed_equals_separate(name: str) -> None:
    m, lengths = model(name), (6, 1, 9)
    parts = [tokens(1, n, seed=n) for n in lengths]
    ids, offsets = torch.cat(parts, 1), torch.tensor([0, 6, 7, 16], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    separate = torch.cat([m(p).logits for p in parts], 1)
    assert_same(m(ids, cu_seqlens=offsets).logits, separate)
    assert_same(m(ids, position_ids=positions).logits, separate)


@every_model
@torch.no_grad()
def test_model_save_load_roundtrip(name: str, tmp_path) -> None:
    m, ids = model(name), tokens(1, 8)
    m.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert isinstance(again, SlipstreamForCausalLM)
    assert again.config.mixers == m.config.mixers
    assert torch.equal(again.eval()(ids).logits, m(ids).logits)


@every_model
@torch.no_grad()
def test_model_generates_the_same_without_a_cache(name: str) -> None:
    """Greedy, and by beams, of which a state may be left with another's tokens."""
    m, ids = model(name), tokens(2, 5)
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    for beams in (1, 3):
        cached = m.generate(input_ids=ids, num_beams=beams, **options)
        plain = m.generate(input_ids=ids, num_beams=beams, use_cache=False, **options)
        assert cached.tolist() == plain.tolist()


@every_model
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.sample(
    which=lambda name, reentrant: not reentrant or name in ("hybrid", "rwkv7", "gla")
)
def test_model_gradient_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    m, ids = model(name).train(), tokens(2, 9)
    m(ids, labels=ids).loss.backward()
    plain = {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}
    if name in PARTS:
        assert all(p.grad is not None and p.grad.any() for p in m.parameters())
    m.zero_grad()
    # the method and its argument have other names before transformers 5.20
    word = "activation" if hasattr(m, "activation_checkpointing_enable") else "gradient"
    options = {f"{word}_checkpointing_kwargs": {"use_reentrant": reentrant}}
    getattr(m, f"{word}_checkpointing_enable")(**options)
    m(ids, labels=ids).loss.backward()
    for n, p in m.named_parameters():
        if n in plain:
            torch.testing.assert_close(p.grad, plain[n], msg=n)
    for given in ({"use_cache": True}, {"cache": StateCache(len(m.model.layers))}):
        with pytest.raises(ValueError, match="use_cache: want False, and no cache, of a"):
            m(ids, **given)
    greedy = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    found = m.generate(ids, attention_mask=torch.ones_like(ids), **greedy)  # as callbacks call it
    assert torch.equal(found, m.eval().generate(ids, attention_mask=torch.ones_like(ids), **greedy))


@every_model
# seconds each
@pytest.mark.sample(which=lambda name: name in ("hybrid", "kda", "mamba2"))
# dynamo instantiates autograd functions itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_model_training_step_compiles_fullgraph(name: str) -> None:
    torch.compiler.reset()  # the limit of recompilations is one for all models
    m, ids = model(name).train(), tokens(2, 20)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    assert_same(compiled(ids, labels=ids).loss, m(ids, labels=ids).loss)
    compiled(ids, labels=ids).loss.backward()
    assert m.model.embed_tokens.weight.grad is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which Dynamo asks for
def test_layers_compile_once_a_kind() -> None:
    """As torchtitan does it: the tables of positions that layers share are no part of a graph."""
    torch.compiler.reset()
    mixers: list[Any] = ["gated_deltanet", "attention"] * 2
    made = SlipstreamConfig(vocab_size=VOCAB, hidden_size=16, num_heads=2, mixers=mixers)
    m, ids = SlipstreamForCausalLM(made).train(), tokens(2, 20)
    want = m(ids, labels=ids).loss
    graphs = CompileCounterWithBackend("aot_eager")
    for layer in m.model.layers:
        layer.compile(backend=graphs, fullgraph=True)
    for _ in range(2):
        assert_same(m(ids, labels=ids).loss, want)
    assert graphs.frame_count == 2


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{}, {"padded": True}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str
)
def test_model_generates_from_embeddings(options: dict) -> None:
    """The tokens that follow the ids with these embeddings."""
    m, lookup = model("kda"), "prompt_lookup_num_tokens" in options
    ids = tokens(1 if lookup else 2, 9)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **options}
    if options.pop("padded", False):
        options["attention_mask"] = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    want = m.generate(ids, **options)[:, 9:]
    embeddings = m.get_input_embeddings()(ids)
    assert torch.equal(m.generate(inputs_embeds=embeddings, **options), want)
    # beside the ids the result has both
    both = m.generate(ids, inputs_embeds=embeddings, **options)
    assert torch.equal(both, torch.cat([ids, want], 1))


def test_model_generation_continues_from_a_cache() -> None:
    m, ids = model("hybrid"), tokens(1, 6)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    out = m.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **options
    )
    more = torch.cat([out.sequences, tokens(1, 3, seed=9)], 1)
    mask = torch.ones_like(more)
    fresh = m.generate(input_ids=more, attention_mask=mask, **options)
    continued = m.generate(input_ids=more, attention_mask=mask, **{CACHE: out[CACHE]}, **options)
    assert fresh.tolist() == continued.tolist()


def test_model_takes_its_cache_by_either_name() -> None:
    m, ids = model("hybrid"), tokens(2, 9)
    whole = m(ids).logits[:, -1:]
    for name in ("cache", "past_key_values"):
        out = m(ids[:, :8], use_cache=True)
        last = m(ids[:, 8:], **{name: out[CACHE]}, use_cache=True).logits
        torch.testing.assert_close(last, whole, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="got both"):
        m(ids, cache=out[CACHE], past_key_values=out[CACHE])


@pytest.mark.parametrize("ids", [[[1, 2, VOCAB]], [[1, -1, 3]]])
def test_model_rejects_ids_outside_vocabulary(ids: list) -> None:
    bad = next(i for i in ids[0] if not 0 <= i < VOCAB)
    with pytest.raises(ValueError, match=rf"{bad} .*\(0, {ids[0].index(bad)}\).* {VOCAB}"):
        model("hybrid")(torch.tensor(ids))


def test_model_loss_is_next_token_cross_entropy() -> None:
    m, ids = model("hybrid"), tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    logits = m(ids).logits
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    out = m(ids, labels=labels)
    torch.testing.assert_close(out.loss, want)
    assert_same(out.logits, logits)
    assert out.past_key_values is None
    assert m(ids, labels=labels, skip_logits=True).logits is None
    m.train()
    trained = m(ids, labels=labels)
    torch.testing.assert_close(trained.loss, want)
    assert trained.logits is None
    assert_same(m(ids, labels=labels, skip_logits=False).logits, logits)
    some = m(ids, labels=labels, logits_to_keep=2, num_items_in_batch=10)
    torch.testing.assert_close(some.loss, want * 13 / 10)
    assert_same(some.logits, logits[:, -2:])


def test_model_loss_ignores_padding() -> None:
    m, ids = model("hybrid"), tokens(1, 6)
    padded, mask = F.pad(ids, (3, 0)), F.pad(torch.ones_like(ids), (3, 0))
    want = m(ids, labels=ids).loss
    torch.testing.assert_close(m(padded, attention_mask=mask, labels=padded).loss, want)


@pytest.mark.parametrize(
    ("mixers", "message"),
    [
        ([], "want one entry per layer"),
        (["gated_deltanet", "nonesuch"], r"mixers\[1\].*nonesuch"),
        ([{"num_heads": 2}], r"mixers\[0\]"),
        (["gated_deltane"], r"mixers\[0\].*did you mean gated_deltanet\?"),
    ],
)
def test_config_rejects_mixers(mixers: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlipstreamConfig(mixers=mixers)


def test_model_rejects_a_foreign_cache() -> None:
    m, ids = model("gated_deltanet"), tokens(1, 3)
    with pytest.raises(TypeError, match="past_key_values"):
        m(ids, past_key_values=())
    with pytest.raises(ValueError, match="past_key_values"):
        m(ids, past_key_values=StateCache(5))


def test_model_rejects_a_mask_of_another_shape() -> None:
    m, ids = model("gated_deltanet"), tokens(2, 5)
    with pytest.raises(ValueError, match="attention_mask: want the 5 columns of input_ids, got 3"):
        m(ids, attention_mask=torch.ones(2, 3))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    cache = m(ids, attention_mask=mask, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"want the 1 columns .*, or 6 .*, got 5"):
        m(ids[:, :1], attention_mask=mask, past_key_values=cache)
