"""vLLM's layers with vLLM's kernels and with slipstream's, in turns in one process.

    pip install vllm==0.26.0               beside slipstream, in torch 2.11
    python bench/engine_layers.py          a token of each sequence, and prompts
    python bench/engine_layers.py --only Mamba --profile

What a layer does between its projections, whose results are given: convolution, gates, states, norm
and what puts them in order. bf16, states in float32, in pages as vLLM lays them out. GDN as in
Qwen3-Next, KDA as in Kimi Linear, Mamba-2 as in Nemotron-H 8B. ours and theirs: of a token, from a
CUDA graph of ten calls, each on other sequences, so that no state is in the L2 cache; of prompts by
calls, with a cold one. changed: of how many tokens the largest of 4,096 random logits of the output
is another one. compilations: of ours, after a layer's first token or prompt. --profile prints the
kernels of a call with their microseconds besides.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from harness import BF16, DEVICE, Report, error, graph_ms, in_turns, kernels, parser
from torch import Tensor, nn
from triton import knobs

from slipstream.runtime import compile_ahead

CASES: dict[str, tuple[int, ...]] = {f"decode batch {n}": (1,) * n for n in (1, 8, 64)}
CASES |= {"prefill 1x8192": (8192,), "prefill 8x1024": (1024,) * 8}
LARGEST = max(len(x) for x in CASES.values())
TURNS, WORDS, CHUNK, PAGE, BLOCK = 10, 4096, 128, 4096, 1 << 20
BACKENDS, MAMBA = "vllm.v1.attention.backends", "vllm.model_executor.layers.mamba"
QWEN3_NEXT = {
    "hidden_size": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
KIMI = {
    "hidden_size": 2304, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "linear_attn_config": {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
}  # fmt: skip
NEMOTRON = {
    "hidden_size": 4096, "ssm_state_size": 128, "conv_kernel_size": 4, "intermediate_size": 8192,
    "use_conv_bias": True, "use_bias": False, "n_groups": 8, "num_heads": 128, "head_dim": 64,
}  # fmt: skip


class Given(nn.Module):
    """In the place of a projection to `width` channels: the first rows of what one has made, over
    which a layer may write."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.made = torch.randn(tokens, width, dtype=BF16, device=DEVICE)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.made[: x.shape[0]], None


class Passed(nn.Module):
    """In the place of the last projection."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


def gdn(config: Any) -> Any:
    layers = import_module(f"{MAMBA}.gdn.qwen_gdn_linear_attn")
    made = layers.QwenGatedDeltaNetAttention
    options = {"gqa_interleaved_layout": True}
    return lambda prefix: made(SimpleNamespace(**QWEN3_NEXT), config, prefix, **options)


def kda(config: Any) -> Any:
    layers = import_module(f"{MAMBA}.gdn.kimi_gdn_linear_attn")
    return lambda prefix: layers.KimiGatedDeltaNetAttention(SimpleNamespace(**KIMI), config, prefix)


def mamba2(config: Any) -> Any:
    mixer, options = import_module(f"{MAMBA}.mamba_mixer2").MambaMixer2, dict(NEMOTRON)
    options |= {"model_config": config.model_config, "cache_config": config.cache_config}
    return lambda prefix: mixer(**options, prefix=prefix)


# a model -> what makes its layers, and the module and name of its metadata's builder
MODELS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "GDN 16/32x128": (gdn, "gdn_attn", "GDNAttentionMetadataBuilder"),
    "KDA 32x128": (kda, "gdn_attn", "GDNAttentionMetadataBuilder"),
    "Mamba-2 128x64 state 128": (mamba2, "mamba2_attn", "Mamba2AttentionMetadataBuilder"),
}
PROJECTIONS = ("in_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "o_proj")
PROJECTIONS += tuple(f"{x}_proj" for x in ("q", "k", "v", "b", "f_a", "f_b", "g_a", "g_b"))
compiled: list[object] = []


@contextmanager
def engine() -> Iterator[Any]:
    """vLLM's configuration, one process of a group of one, and its update of Mamba's states."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    config = VllmConfig(compilation_config=CompilationConfig(mode=0, cudagraph_mode="NONE"))
    config.additional_config = {"gdn_prefill_backend": "triton"}
    text = SimpleNamespace(linear_key_head_dim=128)
    config.model_config = SimpleNamespace(
        dtype=BF16, hf_text_config=text, get_mamba_chunk_size=lambda: CHUNK, is_moe=False
    )
    config.cache_config.mamba_ssm_cache_dtype = "float32"
    config.cache_config.mamba_block_size = BLOCK
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    with set_current_vllm_config(config), TemporaryDirectory() as folder:
        at = f"file://{folder}/store"
        parallel_state.init_distributed_environment(1, 0, at, 0, backend)
        parallel_state.initialize_model_parallel()
        dispatch: Any = import_module(f"{MAMBA}.ops.ssu_dispatch")
        dispatch._mamba_ssu_backend = dispatch.TritonSSUBackend(config.mamba_config)
        yield config


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def filled(layer: nn.Module) -> None:
    """Random parameters, of the gates as Mamba-2, KDA and Gated DeltaNet begin to be trained."""
    for name, p in layer.named_parameters():
        x, some = torch.randn(p.shape, device=p.device), torch.rand(p.shape, device=p.device)
        if name in ("A", "A_log"):
            rate = 1 + 15 * some
            x = -rate if name == "A" else rate.log()
        elif name.endswith("norm.weight"):
            x = 1 + 0.1 * x
        elif name == "dt_bias":
            dt = 1e-3 * 100**some
            x = dt + (-(-dt).expm1()).log()
        elif p.dim() > 1:
            x *= p.shape[-1] ** -0.5
        p.data.copy_(x)


class Pair:
    """A layer as vLLM's class and as ours: the same parameters, projections and pools."""

    def __init__(self, model: str, config: Any, tokens: int) -> None:
        make, module, builder = MODELS[model]
        self.model = model
        custom: Any = import_module("vllm.model_executor.custom_op")
        ours, self.config = dict(custom.op_registry_oot), config
        made, number = make(config), list(MODELS).index(model)
        with torch.device(DEVICE), default_dtype(BF16):
            custom.op_registry_oot.clear()
            theirs = made(f"theirs.{number}.mixer")
            custom.op_registry_oot.update(ours)
            self.layers = {"ours": made(f"ours.{number}.mixer"), "theirs": theirs}
        filled(theirs)
        self.layers["ours"].load_state_dict(theirs.state_dict())
        for layer in self.layers.values():
            for name in PROJECTIONS:
                child: Any = getattr(layer, name, None)
                if child is not None:
                    is_last = name in ("out_proj", "o_proj")
                    width = child.weight.shape[0]
                    setattr(layer, name, Passed() if is_last else Given(tokens, width))
        spec_of: Any = import_module("vllm.v1.kv_cache_interface").MambaSpec
        shapes, dtypes = theirs.get_state_shape(), theirs.get_state_dtype()
        shapes = shapes[: len(dtypes)]
        spec = spec_of(block_size=BLOCK, shapes=shapes, dtypes=dtypes)
        self.page = -(-spec.page_size_bytes // PAGE) * PAGE
        self.shapes, self.dtypes, self.blocks = shapes, dtypes, 1 + TURNS * LARGEST
        self.pools: list[Tensor] = []
        build = getattr(import_module(f"{BACKENDS}.{module}"), builder)
        self.builder = build(spec, [], config, DEVICE)

    def begin(self) -> None:
        """The same states in the pages of both, those of a block one behind the other, and the same
        projections."""
        torch.manual_seed(0)
        if not self.pools:
            raw = torch.zeros(self.blocks, self.page, dtype=torch.int8, device=DEVICE)
            at = 0
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
                size = prod(shape) * dtype.itemsize
                self.pools.append(raw[:, at : at + size].view(dtype).unflatten(1, shape))
                at += size
        for x in self.pools:
            x.copy_(0.1 * torch.randn(1, *x.shape[1:], device=DEVICE))
        for name, ours in self.layers["ours"].named_children():
            if isinstance(ours, Given):
                ours.made.normal_()
                getattr(self.layers["theirs"], name).made.copy_(ours.made)
        for layer in self.layers.values():
            layer.kv_cache = tuple(self.pools)

    def metadata(self, lengths: Sequence[int], turn: int) -> Any:
        """Of sequences in blocks of their own at each turn; those that decode have 100 tokens."""
        N, is_decode = len(lengths), max(lengths) == 1
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        seen = torch.tensor(lengths, dtype=torch.int32) + 99 * is_decode
        blocks = torch.arange(N, dtype=torch.int32, device=DEVICE) + 1 + turn * N
        common: Any = import_module("vllm.v1.attention.backend").CommonAttentionMetadata
        return self.builder.build(0, common(
            query_start_loc=offsets.to(DEVICE), query_start_loc_cpu=offsets,
            seq_lens=seen.to(DEVICE), num_reqs=N, num_actual_tokens=sum(lengths),
            max_query_len=max(lengths), max_seq_len=int(seen.max()),
            block_table_tensor=blocks[:, None], slot_mapping=blocks.long(),
            is_prefilling=torch.full((N,), not is_decode), seq_lens_cpu_upper_bound=seen,
            _seq_lens_cpu=seen, _num_computed_tokens_cpu=seen - torch.tensor(lengths),
        ))  # fmt: skip

    def calls(self, lengths: Sequence[int]) -> dict[str, Callable[[], Tensor]]:
        from vllm.forward_context import set_forward_context

        turns = TURNS if max(lengths) == 1 else 1
        metadata = [self.metadata(lengths, i) for i in range(turns)]
        x = torch.zeros(sum(lengths), 1, dtype=BF16, device=DEVICE)

        def call(layer: Any, numbers: Iterator[int]) -> Tensor:
            of_layers = {layer.prefix: metadata[next(numbers) % turns]}
            with set_forward_context(of_layers, self.config, num_tokens=x.shape[0]):
                if not hasattr(layer, "o_proj"):
                    return layer(x)
                out = x.new_empty(x.shape[0], layer.head_dim * layer.local_num_heads)
                layer(hidden_states=x, positions=x, output=out)
                return out

        counts = {name: iter(range(1 << 30)) for name in self.layers}
        return {name: partial(call, layer, counts[name]) for name, layer in self.layers.items()}


def row(pair: Pair, case: str, report: Report) -> Mapping[str, object]:
    lengths, found = CASES[case], {}
    for name in pair.layers:
        pair.begin()
        found[name] = pair.calls(lengths)[name]().reshape(sum(lengths), -1).float()
    compile_ahead.finish()
    before, calls = len(compiled), pair.calls(lengths)
    calls["ours"]()
    head = torch.randn(found["ours"].shape[1], WORDS, device=DEVICE)
    got, want = ((x @ head).argmax(-1) for x in found.values())
    cells = {
        "engine": "vllm", "version": version("vllm"), "model": pair.model, "case": f"layer {case}",
        "ours": "", "theirs": "", "unit": "us", "ratio": "",
        "changed": f"{int((got != want).sum())} of {len(got)}",
        "compilations": len(compiled) - before,
    }  # fmt: skip
    if max(lengths) == 1:
        times = {name: graph_ms(call, report.runs(20)) for name, call in calls.items()}
    else:
        times = in_turns(calls, report.runs(10))
    if report.options.profile:
        for name, call in calls.items():
            for kernel, ms in kernels(call):
                print(f"    {pair.model} {case} {name} {ms * 1e3:7.1f} us {kernel[:100]}")
        print(f"    difference {error(found['ours'], found['theirs']):.1e}")
    cells |= {name: f"{ms * 1e3:.1f}" for name, ms in times.items()}
    return cells | {"ratio": f"{times['ours'] / times['theirs']:.2f}"}


def rows(model: str, config: Any, report: Report) -> Iterator[Mapping[str, object]]:
    pair = Pair(model, config, max(sum(x) for x in CASES.values()))
    for case in CASES:
        if report.left() > 0:
            yield row(pair, case, report)


def main(argv: Sequence[str] | None = None) -> None:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--profile", action="store_true", help="print kernels besides")
    report = Report(options.parse_args(argv))
    if DEVICE.type == "cpu" or find_spec("vllm") is None:
        print("vllm is left out")
        return
    knobs.runtime.jit_cache_hook = lambda **given: compiled.append(given.get("fn")) or False
    with torch.inference_mode(), engine() as config:
        from slipstream.integrations import vllm

        vllm.register()
        report.measure((x, "engines", partial(rows, x, config, report)) for x in MODELS)


if __name__ == "__main__":
    main()
