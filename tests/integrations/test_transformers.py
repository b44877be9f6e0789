"""attn_implementation="slipstream" beside "eager", in tiny models of transformers."""

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from transformers import StaticCache

from slipstream.integrations import linear_mixers
from slipstream.integrations import transformers as ours
from tests.integrations.small_models import MODELS, SIZES, make

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def _nothing_dense(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everywhere but where a test wants it, a dense mask is a failure."""
    if "dense" in request.node.name:
        return

    def refuse() -> None:
        raise AssertionError("a dense mask")

    monkeypatch.setattr(ours, "_say_dense", refuse)


def assert_same(eager: Any, slip: Any, live: Tensor | None = None, **inputs: Any) -> None:
    """Logits at the live tokens, and gradients of all parameters."""
    grads = []
    logits = [model(**inputs).logits for model in (eager, slip)]
    if live is not None:
        logits = [x[live] for x in logits]
    weight = torch.randn_like(logits[0])
    for model, x in zip((eager, slip), logits):
        grads.append(torch.autograd.grad((x * weight).sum(), list(model.parameters())))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    for got, want in zip(grads[1], grads[0]):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()) + 1e-6)


@every_model
def test_model_matches_eager(name: str) -> None:
    assert_same(*make(name), input_ids=torch.randint(1, 61, (2, 19)))


def test_global_heads_of_512_match_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4: its global layers have heads of another width, and grouped keys."""
    config = transformers.Gemma4TextConfig(
        **{**SIZES, "head_dim": 16}, sliding_window=6, hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=61, layer_types=["sliding_attention", "full_attention"],
        attn_implementation="eager",
    )  # fmt: skip
    eager = transformers.Gemma4ForCausalLM(config).eval()
    slip = copy.deepcopy(eager)
    slip.set_attn_implementation("slipstream")
    widths, attend = [], ours.attention

    def noted(q: Tensor, *args: Any, **options: Any) -> Any:
        widths.append(q.shape[-1])
        return attend(q, *args, **options)

    monkeypatch.setattr(ours, "attention", noted)
    assert_same(eager, slip, input_ids=torch.randint(1, 61, (2, 19)))
    assert widths == [16, 512]


@pytest.mark.parametrize(
    ("name", "kind"),
    # gpt_oss does not pass positions to its mask
    [
        (x, y)
        for x in MODELS
        for y in ("plain", "padded", "packed")
        if (x, y) != ("gpt_oss", "packed")
    ],
)
def test_masks_read_nothing_while_a_graph_is_captured(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor can transformers look at positions then: its masks may cut rows at every token."""
    eager, slip = make(name)
    ids = torch.randint(1, 61, (2, 21))
    inputs: dict[str, Any] = {"use_cache": False}
    live = torch.ones_like(ids, dtype=torch.bool)
    if kind == "padded":
        live[0, :5] = False
        inputs["attention_mask"] = live.long()
    if kind == "packed":
        inputs["position_ids"] = (torch.arange(21) % 7)[None].expand(2, -1)
    want = eager(ids, **inputs).logits
    build = ours.build_mask

    def refuse(*_: Any) -> None:
        raise AssertionError("the host waits")

    def without_reading(*given: Any) -> Any:
        with monkeypatch.context() as inside:
            for read in ("__bool__", "item", "tolist", "nonzero"):
                inside.setattr(Tensor, read, refuse)
            return build(*given)

    monkeypatch.setattr(ours, "build_mask", without_reading)
    monkeypatch.setattr(linear_mixers, "is_unreadable", lambda x: True)
    monkeypatch.setattr(transformers.masking_utils, "is_tracing", lambda *_: True)
    got = slip(ids, **inputs).logits
    torch.testing.assert_close(got[live], want[live], rtol=1e-4, atol=1e-4)


@every_model
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_matches_eager(name: str, side: str) -> None:
    mask = torch.ones(3, 17, dtype=torch.int64)
    columns = slice(0, 7) if side == "left" else slice(10, 17)
    mask[1, columns] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert_same(
        *make(name),
        live=mask.bool(),
        input_ids=torch.randint(1, 61, (3, 17)),
        attention_mask=mask,
        position_ids=positions,
    )


class _Apart:
    """A model that runs each of the packed sequences in rows of its own."""

    def __init__(self, model: Any, lengths: tuple[int, ...]) -> None:
        self.model, self.lengths, self.parameters = model, lengths, model.parameters

    def __call__(self, input_ids: Tensor, **_: Any) -> Any:
        every = [self.model(x, use_cache=False).logits for x in input_ids.split(self.lengths, 1)]
        return SimpleNamespace(logits=torch.cat(every, 1))


@every_model
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("beside", ["nothing", "a cache", "a mask", "padding"])
def test_packed_positions_stay_apart(name: str, rows: int, beside: str) -> None:
    """transformers' own functions mix the sequences beside a cache or a mask, gpt-oss always."""
    lengths = (3, 9, 1, 8)
    at = torch.cat([torch.arange(n) for n in lengths])[None].repeat(rows, 1)
    ids = torch.randint(1, 61, (rows, sum(lengths)))
    eager, slip = make(name)
    more, cached, live = {}, beside == "a cache", None
    if beside == "a mask":
        more["attention_mask"] = torch.ones_like(ids)
    elif beside == "padding":  # of the last sequence
        more["attention_mask"] = (torch.arange(ids.shape[1]) < 18).long().repeat(rows, 1)
        live = more["attention_mask"].bool()
    given = {"input_ids": ids, "position_ids": at, "use_cache": cached, **more}
    assert_same(_Apart(eager, lengths), slip, live, **given)


@pytest.mark.parametrize("told", ["offsets", "seq_idx"])
def test_offsets_of_text_are_not_those_of_images(told: str) -> None:
    """The layers of images get them too, and have tokens of their own."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    text = transformers.LlamaConfig(**SIZES)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=60)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.set_attn_implementation("slipstream")
    first = torch.randint(1, 60, (1, 5))
    second = torch.randint(1, 60, (1, 7))
    second[0, 1:5] = 60
    images = torch.randn(1, 3, 8, 8)
    want = [model(first), model(second, pixel_values=images)]
    given = {"position_ids": torch.cat([torch.arange(5), torch.arange(7)])[None]}
    cuts = torch.tensor([0, 5, 12], dtype=torch.int32)
    if told == "offsets":
        given |= {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}
    else:
        given["seq_idx"] = torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32)
    got = model(torch.cat([first, second], 1), pixel_values=images, use_cache=False, **given)
    torch.testing.assert_close(got.logits, torch.cat([x.logits for x in want], 1))
    if told == "offsets":  # those of text have to be right
        given = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cuts - 1)
        with pytest.raises(ValueError, match="to the 12 tokens"):
            model(torch.cat([first, second], 1), pixel_values=images, use_cache=False, **given)


@every_model
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generation_matches_eager(name: str, cache: str, padded: bool) -> None:
    eager, slip = make(name)
    ids = torch.randint(1, 61, (3, 9))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = mask[2, :1] = 0
        ids[mask == 0] = 0
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 14,
        "do_sample": False,
        "eos_token_id": None,
        "return_dict_in_generate": True,
        "output_logits": True,
        "disable_compile": True,
    }
    if cache == "static":
        options["cache_implementation"] = "static"
    want, got = (model.generate(ids, **options) for model in (eager, slip))
    for step, (x, y) in enumerate(zip(got.logits, want.logits)):
        # two logits may be so near that they take different tokens, and go apart from there
        alike = (got.sequences == want.sequences)[:, : 9 + step].all(1)
        assert alike.sum() >= 2
        torch.testing.assert_close(x[alike], y[alike], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("static", [False, True])
def test_prompt_in_parts_matches_eager(name: str, static: bool) -> None:
    """Several queries on a cache, padded on the left."""
    eager, slip = make(name)
    ids, mask = torch.randint(1, 61, (2, 40)), torch.ones(2, 40, dtype=torch.int64)
    mask[1, :3] = 0
    logits = []
    for model in (eager, slip):
        cache = StaticCache(config=model.config, max_cache_len=50) if static else None
        with torch.no_grad():
            first = model(ids[:, :13], attention_mask=mask[:, :13], past_key_values=cache)
            then = first.past_key_values
            parts = [first.logits]
            for a, b in ((13, 15), (15, 40)):
                out = model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=then)
                parts.append(out.logits)
        logits.append(torch.cat(parts, 1)[mask.bool()])
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)


def test_holes_go_through_a_dense_mask(caplog: pytest.LogCaptureFixture) -> None:
    ours._say_dense.cache_clear()
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 4:6] = 0
    inputs = {"input_ids": torch.randint(1, 61, (2, 12)), "attention_mask": mask}
    with caplog.at_level(logging.WARNING):
        for name in ("gemma2", "gpt_oss"):
            assert_same(*make(name), live=mask.bool(), **inputs)
    assert [x.name for x in caplog.records].count(ours.__name__) == 1


def test_user_mask_is_taken() -> None:
    mask = torch.rand(2, 1, 12, 12) < 0.6
    mask |= torch.eye(12, dtype=torch.bool)
    added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    eager, slip = make("llama")
    ids = torch.randint(1, 61, (2, 12))
    want = eager(ids, attention_mask=added).logits
    for given in (mask, added):
        torch.testing.assert_close(slip(ids, attention_mask=given).logits, want)


def test_unknown_mask_function_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_say_dense", lambda: None)
    every: Callable = lambda batch, head, q, k: (q + k) % 2 == 0  # noqa: E731
    mask = ours.slipstream_mask(2, 5, 5, mask_function=every)
    assert mask is not None and mask.dtype == torch.bool and mask.shape == (2, 1, 5, 5)
