"""What no number of a whole call tells: names of samples, shapes of gradients, and what ranks,
engines and sharded models hand on."""

import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from slipstream import layers
from slipstream.compat import causal_conv1d, flash_attn_interface
from slipstream.compat.fla.adaptor import _cast_output
from slipstream.compat.flash_attn.ops.triton import layer_norm
from slipstream.compat.mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from slipstream.compat.mamba_ssm.ops.triton.selective_state_update import selective_state_update
from slipstream.compat.mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from slipstream.compiler import toolchain
from slipstream.compiler.compile_worker import Worker
from slipstream.integrations import class_mixers, linear_mixers, sglang, transformers, usage
from slipstream.integrations.rows import Rows
from slipstream.kernels.attention import cache
from slipstream.kernels.attention.eager import with_torch
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attnres import op as attnres
from slipstream.kernels.loss.eager import LossInputs
from slipstream.kernels.loss.shard import RankRows, Shard
from slipstream.models import (
    SlipstreamConfig,
    SlipstreamForCausalLM,
    graphs,
    head_layouts,
    tensor_parallel,
)
from slipstream.nn import decoding
from slipstream.ops import _running_sums, loss
from slipstream.runtime import backends, call_replay, context_exchange, token_ids
from slipstream.runtime.recording import Line
from slipstream.tools import doctor_checks, samples, terminal
from slipstream.tools.catalog import OPERATORS, Shape
from slipstream.tools.precompile_cache import Flags, shapes
from slipstream.training import console, parallel, trainer
from tests.support.engine_plugins import forget_vllm


def test_fixed_arguments_of_samples_are_arguments() -> None:
    for row in OPERATORS:
        names = {word.partition("=")[0] for word in row.tensors.split()}
        assert {*row.fixed.split()} <= names and {*row.written.split()} <= names, row


@pytest.mark.parametrize("normed", [True, False])
def test_gradients_of_attnres_have_the_shapes_of_inputs(normed: bool) -> None:
    x = [torch.empty(5, 8, device="meta") for _ in range(3)]
    weight = torch.empty(8, device="meta")
    da, dwo, *dx = attnres._backward_fake(weight, x, weight, weight if normed else None, 1e-6, 1.0)
    assert da.shape == (8,) and dwo.shape == (8 * normed,) and [y.shape for y in dx] == 3 * [(5, 8)]


def test_running_max_goes_on_behind_other_ranks() -> None:
    k, w, start = torch.randn(1, 6, 4), -torch.rand(4), torch.randn(1, 4)
    whole = _running_sums.running_max(k, w, start, None, None)
    share = SimpleNamespace(
        packed=False,
        earlier=(0,),
        later=(),
        crossings=SimpleNamespace(any=True),
        pieces=(0,),
        head_end=3,
        local_states=lambda first, nothing, rows: nothing,
        gather=lambda x: [whole[:, 2], x],
        tokens_of=lambda rank, n: 3,
    )
    context: Any = SimpleNamespace(share=lambda T: share, offsets_on=lambda device: None)
    m = _running_sums.running_max(k[:, 3:] - 1.0, w, start, None, context)
    want = _running_sums.running_max(torch.cat([k[:, :3], k[:, 3:] - 1.0], 1), w, start, None, None)
    torch.testing.assert_close(m, want[:, 3:])


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_models_save_a_tied_head_once(tied: bool) -> None:
    config = SlipstreamConfig(
        vocab_size=8, hidden_size=32, mixers=["gla"], num_heads=2, tie_word_embeddings=tied
    )
    model, saved = SlipstreamForCausalLM(config), mock.Mock()
    weights = {"lm_head.weight": torch.zeros(8, 8)}
    with (
        mock.patch.object(tensor_parallel, "is_sharded", return_value=True),
        mock.patch.object(tensor_parallel, "whole_state_dict", return_value=weights),
        mock.patch.object(torch.distributed, "get_rank", return_value=0),
        mock.patch("transformers.PreTrainedModel.save_pretrained", saved),
    ):
        model.save_pretrained("nowhere")
    names = [] if tied else ["lm_head.weight"]
    assert [*saved.call_args.kwargs["state_dict"]] == names


# the wider heads are copied by 16 bytes, if both have them
@pytest.mark.parametrize(("K", "V"), [(3, 4), (8, 4), (8, 6)])
def test_vllm_projections_are_put_in_order(K: int, V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("forward_context", "model_executor.layers.mamba.mamba_utils"):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", SimpleNamespace())
    forget_vllm()
    try:
        from slipstream.integrations import vllm_steps

        cls: Any = vllm_steps.delta_net(nn.Module, None)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.gqa_interleaved_layout, layer.tp_size = True, 1
        layer.num_k_heads, layer.head_k_dim, layer.head_v_dim = 2, K, V
        # of each head of keys: q, k, two heads of V values, and their z; two of b, two of a
        x, ba = torch.randn(5, 4 * (K + 2 * V)), torch.randn(5, 2 * 4)
        parts = x.unflatten(1, (2, -1)).split([K, K, 2 * V, 2 * V], -1)
        b, a = ba.unflatten(1, (2, -1)).chunk(2, -1)
        wants = torch.cat([t.flatten(1) for t in parts], 1), b.flatten(1), a.flatten(1)
        for got, want in zip(layer._ordered(x, ba), wants, strict=True):
            assert torch.equal(got, want)
    finally:
        forget_vllm()


def test_locks_are_held_where_threads_share(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, site, worker = mock.MagicMock(), usage.Site(), Worker()
    monkeypatch.setattr(usage, "_lock", lock)
    site.refuse("why")
    site.calls()
    for name in ("_start", "_ask"):
        monkeypatch.setattr(worker, name, lambda *_: None)
    monkeypatch.setattr(worker, "_lock", lock)
    worker.start()
    job: Any = None
    worker.compile(job)
    assert lock.__enter__.call_count == lock.__exit__.call_count == 4


def test_rows_that_are_ignored_have_no_column() -> None:
    """Of columns 4 to 6; the last one is what stands for a row that is ignored."""
    target, shard = torch.tensor([3, 4, 5, 6, 7, -100]), Shard(4, 3, 9, None)
    at, inside = RankRows(torch.zeros(6, 3), target, LossInputs(ignore_index=6), shard).columns
    assert at.tolist() == [0, 0, 1, 0, 0, 0]
    assert inside.tolist() == [False, True, True, False, False, False]


def test_sequences_are_present_without_a_missing_page_in_use() -> None:
    """Of 4 keys each, of which the third sequence begins another."""
    table = torch.tensor([[0, 2], [0, -1], [0, -1], [-1, 0]])
    call: Any = SimpleNamespace(
        table=table, lengths=torch.tensor([8, 4, 5, 0]), k=torch.zeros(3, 4, 1, 8)
    )
    assert cache.present(call).tolist() == [8, 4, 0, 0]


def test_norm_of_parts_has_the_gradient_of_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    x, eps = torch.randn(3, 8, dtype=torch.float64, requires_grad=True), 0.1
    shard: Any = SimpleNamespace(size=1, group=None)
    monkeypatch.setattr(context_exchange, "_summed", lambda x, _: x)
    y = context_exchange.norm_of_parts(x, eps, shard)
    want, grad = F.rms_norm(x, (8,), eps=eps), torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(*(torch.autograd.grad(z, x, grad)[0] for z in (y, want)))


def test_precompiled_shapes_are_every_combination() -> None:
    dtypes = (torch.float16, torch.bfloat16)
    found = shapes(dtypes, ("64", "64x128"), Flags(None, None, True))
    parts = [(x.dtype, x.K, x.V, x.packed, x.state, x.grouped, x.T > 1) for x in found]
    either = (False, True)
    sizes = (64, 64), (64, 128)
    want = {
        (d, K, V, packed, state, True, many)
        for d in dtypes for K, V in sizes
        for packed in either for state in either for many in either
    }  # fmt: skip
    assert {*parts} == want and len(parts) == 3 * len(want) // 2


def test_loader_is_as_the_arguments_say(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("num_workers", "pin_memory", "persistent_workers", "multiprocessing_context")
    names = (*names, "prefetch_factor")
    args = {f"dataloader_{x}": object() for x in names}
    monkeypatch.setattr(trainer, "DataLoader", lambda rows, **given: given)
    monkeypatch.setattr(trainer, "Batches", mock.Mock())
    of: Any = SimpleNamespace(args=SimpleNamespace(**args), readers=(), data_collator=None)
    rows: Any = None
    given: Any = trainer.LMTrainer._loader(of, rows, 2)
    assert all(given[x] is args[f"dataloader_{x}"] for x in names)


def test_replayed_lines_are_read_by_others() -> None:
    lines = [Line("let", "1", "n1"), Line("fresh", "n1", "v1"), Line("view", "v1", "v2")]
    lines += [Line("let", "2", "n2"), Line("launch", "p2"), Line("view", "v1", "v3")]
    kept = call_replay._needed(lines, "v1")
    assert [x.left for x in kept] == ["n1", "v1", "v2", ""]


def test_devices_are_asked_for_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU, by -1, has none; slots that a device writes are pinned."""
    pinned: list[bool] = []

    def zeros(*shape: int, pin_memory: bool = False, **options: Any) -> Tensor:
        pinned.append(pin_memory)
        return torch.empty(*shape, **options).zero_()

    monkeypatch.setattr(torch, "zeros", zeros)
    for index in (-1, 0, 1):
        token_ids._Watch(index)
    assert pinned == [False, True, True]
    about = SimpleNamespace(multi_processor_count=7, shared_memory_per_block_optin=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    asked = backends.sm_count.__wrapped__, backends.shared_memory_bytes.__wrapped__
    assert [[f(index) for f in asked] for index in (-1, 0, 1)] == [[2, 1 << 16], [7, 9], [7, 9]]


def test_newest_assembler_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"a": "12.9", "b": "13.0", "c": None, "d": "9.2"}
    monkeypatch.setattr(toolchain, "ptxas_version", versions.get)
    assert [str(x) for x in toolchain._newest_first([Path(x) for x in versions])] == ["b", "a", "d"]


def test_checks_that_were_not_made_are_not_ok() -> None:
    sample: Any = SimpleNamespace(name="broken", inputs=mock.Mock(side_effect=KeyError("q")))
    (check,) = doctor_checks.examine_one(sample, Shape(), torch.device("cpu"), [None])
    assert not check.ok and "KeyError" in check.error


def test_ranks_wait_until_a_model_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder of a checkpoint may be there."""
    model, calls = nn.Linear(2, 2), mock.Mock()
    monkeypatch.setattr(parallel.ranks, "wait", calls.wait)
    kept = lambda model, options: {"weight": 1}  # noqa: E731
    monkeypatch.setattr(parallel.parts, "get_model_state_dict", kept)
    monkeypatch.setattr(parallel, "whole_state_dict", lambda model, whole: whole)
    of: Any = SimpleNamespace(args=SimpleNamespace(should_save=True), model=model, _save=calls.save)
    parallel.ShardedTrainer.save_model(of, "here")
    assert [x for x, *_ in calls.mock_calls] == ["save", "wait"]
    of.model, of.processing_class = mock.Mock(), None
    parallel.ShardedTrainer.save_model(of, str(tmp_path), _internal_call=True)
    of.model.config.save_pretrained.assert_called_once_with(str(tmp_path))


def test_small_functions_by_their_values() -> None:
    x = torch.ones(2)
    got = _cast_output((x, 1, 2), torch.float16)
    assert got[0].dtype == torch.float16 and got[1:] == (1, 2)
    assert flash_attn_interface._without_none((1, 2, None)) == (1, 2)
    assert loss._kl_unsupported(torch.empty(0, 3)) is None
    assert loss._kl_unsupported(torch.empty(3, 0)) == "there are no features"
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False)})
    found = [head_layouts.has_parameter(model, f"{x}.weight") for x in ("a", "b", "a.b")]
    assert found == [True, False, False]
    assert head_layouts.has_parameter(model["a"], "weight")
    assert not head_layouts.has_parameter(model["a"], "bias")
    assert sglang._Kernel.supports_safe_gate
    assert not sglang._Kernel.supports_fused_chain_verify
    (grad,) = torch.autograd.grad(layer_norm._dropped(x.requires_grad_(), 1.0)[0].sum(), x)
    assert grad.eq(0).all()


def test_functions_in_the_place_of_others_have_their_defaults() -> None:
    theirs = (causal_conv1d.causal_conv1d_fn, causal_conv1d.causal_conv1d_update)
    theirs += (selective_scan_fn, mamba_chunk_scan_combined, selective_state_update)
    for f in theirs:
        ours = inspect.signature(getattr(linear_mixers, f.__name__)).parameters
        for name, x in inspect.signature(f).parameters.items():
            if name in ours and x.empty not in (x.default, ours[name].default):
                assert ours[name].default == x.default, (f, name)


def test_class_of_another_module_has_its_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each class of a file in which one looks attention up by its own table."""
    text = "class Plain: ...\nclass Own:\n    by = X" + transformers.OWN_CLASSES
    monkeypatch.setattr(transformers.masks, "modeling_source", lambda name: text)
    for name, uses in (("Plain", True), ("Own", False)):
        methods = {"_can_set_attn_implementation": classmethod(lambda cls: True)}
        cls: Any = type(name, (), methods | {"__module__": __name__})
        monkeypatch.setitem(globals(), name, cls)
        assert transformers.uses_interface(cls) == uses


@pytest.mark.parametrize("cls", [layers.MLA, layers.ForgettingAttention])
def test_tokens_stand_behind_those_of_a_state(cls: Any) -> None:
    layer = cls(32, 2, rotary_dim=16) if cls is layers.ForgettingAttention else cls(32, 2)
    x = torch.randn(1, 6, 32)
    _, state = layer(x[:, :5], use_cache=True)
    for name in state.keys() - {"length"}:
        state[name] = F.pad(state[name], (0, 0) * (state[name].dim() - 2) + (0, 1))
    torch.testing.assert_close(layer.step(x[:, 5:], state), layer(x)[0][:, 5:])


def test_states_go_on_through_ranks() -> None:
    changes = [(1.0, 0.5), (3.0, 0.25), (5.0, 2.0)]
    share: Any = SimpleNamespace(earlier=(0, 1), local_states=lambda states, before, rows: before)
    with mock.patch.object(context_exchange, "gather", return_value=changes):
        before, _ = context_exchange.entry_states(torch.empty(0), None, 1, share)
    assert before == 0.25 * 1.0 + 3.0


def test_bars_are_on_stderr_and_leave_no_trace() -> None:
    assert terminal.bar().console.stderr
    assert console.ConsoleProgress(Console()).bar.live.transient


def test_strengths_of_samples() -> None:
    making = samples.Making(Shape(), {}, {}, torch.device("cpu"))
    for name, mean, std in (("one", 1.0, 0.1), ("state", 0.0, 0.1), ("normal", 0.0, 1.0)):
        x = samples.FILL[name](making, [4000])
        assert abs(x.mean() - mean) < 0.1 * std + 0.01 and abs(x.std() / std - 1) < 0.1


def test_caches_of_inference_mode_are_known() -> None:
    for here in (False, True):
        with torch.inference_mode(here):
            blocks = SimpleNamespace(h=torch.ones(1))
        cache: Any = SimpleNamespace(layers=[], greedy=None, _blocks=blocks)
        assert graphs._of_inference(cache) == here


@pytest.mark.parametrize("cls", [layers.KimiDeltaAttention, layers.GatedDeltaNet, layers.DeltaNet])
def test_beta_of_negative_eigenvalues_is_twice_as_large(cls: Any) -> None:
    layer, x = cls(32, 2, allow_neg_eigval=True), torch.randn(1, 3, 32)
    twice = layer._gates(x)[1]
    layer.allow_neg_eigval = False
    torch.testing.assert_close(twice, 2 * layer._gates(x)[1])


def test_one_query_of_torch_sees_every_key() -> None:
    q, k, v = torch.randn(1, 1, 2, 8), torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8)
    o = with_torch(AttentionInputs(q, k, v), AttentionOptions(1.0, right=0))
    want = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
    torch.testing.assert_close(o, torch.einsum("bhts,bshd->bthd", want, v))


@pytest.mark.skipif(not backends.HAVE_TRITON, reason="wants Triton, which launches import")
def test_tiles_are_of_both_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_launch = importlib.import_module("slipstream.kernels.attention.triton.launch")
    monkeypatch.setattr(attention_launch.tiling, "tiles_for", lambda *given: [given[1:]])
    tensors = torch.empty(1, 4, 3, 64), torch.empty(1, 4, 3, 64), torch.empty(1, 4, 3, 128)
    of: Any = [AttentionInputs(*tensors), AttentionOptions(1.0)]
    assert attention_launch._tiles_of(*of) == (64, 128, 4, False)


def test_tokens_of_class_mixers_move_their_state() -> None:
    q, k, v, g = *torch.randn(3, 2, 1, 3, 4), -torch.rand(2, 1, 3)
    state = torch.randn(2, 3, 4, 4)
    want = g[:, 0, :, None, None].exp() * state + k[:, 0, ..., None] * v[:, 0, :, None]
    o, after = class_mixers._scalar_decay(q, k, v, g, state, Rows((2, 1)), 0.5)
    torch.testing.assert_close(after, want)
    torch.testing.assert_close(o[:, 0], 0.5 * (q[:, 0, :, None] @ want)[:, :, 0])


def test_tables_are_there_for_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, device = mock.Mock(), SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch, "arange", lambda rows, device: torch.zeros(rows))
    monkeypatch.setattr(decoding, "rotary_tables", lambda *_, **__: "tables")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    made: Any = decoding._lasting_tables.__wrapped__
    assert made(4, device, 8, 1e4, torch.float32) == "tables"
    stream.synchronize.assert_called_once_with()
