"""Models whose heads are divided among processes, beside whole ones."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, shard_heads, whole_state_dict
from slipstream.parallel import ContextParallel, shard
from tests.support.fsdp2 import EVERY_MIXER

VOCABULARY, TOKENS = 54, 20
# grouped heads, biases, and what has no heads
OPTIONS: list[Any] = [
    {"type": "attention", "num_kv_heads": 2, "qk_norm": True, "output_gate": True,
     "qkv_bias": True},
    {"type": "gated_deltanet", "num_heads": 2, "num_v_heads": 4, "head_v_dim": 3,
     "conv_bias": True},
    {"type": "kda", "num_heads": 2, "num_v_heads": 4, "gate_bias": True, "conv_size": None},
    {"type": "mamba2", "num_heads": 4, "state_size": 5, "n_groups": 2, "use_bias": True,
     "D_per_channel": True},
    {"type": "mamba2", "num_heads": 4, "state_size": 5, "norm_before_gate": True},
    {"type": "mamba3", "num_heads": 4, "state_size": 8, "n_groups": 2, "mimo_rank": 2,
     "use_bias": True},
    {"type": "mamba3", "num_heads": 4, "state_size": 8, "mimo_rank": 2, "output_norm": True},
    {"type": "retention", "num_kv_heads": 2, "conv_size": 3, "norm_affine": True},
    {"type": "gla", "num_kv_heads": 2, "conv_size": 3},
    {"type": "delta_net", "use_gate": True, "conv_size": None},
    {"type": "mla", "q_lora_rank": 6, "kv_lora_rank": 10, "nope_head_dim": 6, "rope_head_dim": 4,
     "v_head_dim": 8},
    {"type": "gated_deltaproduct", "num_heads": 2, "num_v_heads": 4},
]  # fmt: skip


def make(mixers: list[Any], **options: Any) -> SlipstreamForCausalLM:
    mlps: list[Any] = ["rwkv7", "none", *["swiglu"] * (len(mixers) - 2)]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_heads": 4, "intermediate_size": 12}
    config = SlipstreamConfig(mixers=mixers, mlps=mlps, **{**sizes, **options})
    model = SlipstreamForCausalLM(config).double().train()
    draw = torch.Generator().manual_seed(1)  # what begins at zero says nothing
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype))
    return model


def batch(rows: int) -> torch.Tensor:
    return torch.arange(rows * TOKENS).mul(7).remainder(VOCABULARY).view(rows, TOKENS)


def same(label: str, got: torch.Tensor, want: torch.Tensor) -> None:
    text = f"{label}: "
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9, msg=lambda x: text + x)


def compare(label: str, mixers: list[Any], tensor: int, context: int = 1, **options: Any) -> None:
    """Loss and gradients of processes data x context x tensor beside one; FSDP2 shards over the
    first two. Without them the logits and what is generated are compared, too."""
    from torch.distributed.fsdp import fully_shard

    data = dist.get_world_size() // tensor // context
    names = ("data", "context", "tensor")
    mesh = dist.init_device_mesh("cpu", (data, context, tensor), mesh_dim_names=names)
    ids = batch(data)
    torch.manual_seed(0)
    whole = make(mixers, **options)
    part: Any = make(mixers, **options)
    part.load_state_dict(whole.state_dict())
    part = shard_heads(part, mesh["tensor"])
    if data * context > 1 or "fsdp2" in label:
        over = mesh["data", "context"]._flatten("data_context")
        for unit in (*part.model.layers, part):
            fully_shard(unit, mesh=over)
            # gloo has no mean
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    want = whole(input_ids=ids, labels=ids, num_items_in_batch=10).loss
    want.backward()
    row = mesh.get_local_rank("data")
    plan = ContextParallel(mesh["context"]) if context > 1 else None
    mine = ids[row : row + 1] if data > 1 else ids
    mine = mine if plan is None else shard(mine, plan)
    loss = part(input_ids=mine, labels=mine, num_items_in_batch=10, context=plan).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    same(label, total / tensor, want.detach())
    grads = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
    found = whole_state_dict(part, grads)
    for name, p in whole.named_parameters():
        if p.grad is not None:
            same(f"{label} {name}", found[name], p.grad)
    assert found.keys() == {n for n, p in whole.named_parameters() if p.grad is not None}
    after = whole_state_dict(part)
    for name, x in whole.state_dict().items():
        same(f"{label} weights {name}", after[name], x)
    if data * context == 1 and "causal" in label:
        generated(label, whole.eval(), part.eval())


def generated(label: str, whole: Any, part: Any) -> None:
    ids = batch(2)[:, :7]
    with torch.no_grad():
        same(label, part(input_ids=ids).logits, whole(input_ids=ids).logits)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(part.generate(ids, **options), whole.generate(ids, **options)), label


def planned(rank: int, folder: Path) -> None:
    """A checkpoint that transformers shards, and saves again."""
    from transformers.distributed import DistributedConfig

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.manual_seed(0)
    whole = make(SMALL[:3]).eval()
    if rank == 0:
        whole.save_pretrained(folder / "whole")
    dist.barrier()
    both = DistributedConfig(tp_size=2)
    part = SlipstreamForCausalLM.from_pretrained(folder / "whole", distributed_config=both)
    assert part.model.layers[0].mixer.num_heads == 2
    with torch.no_grad():
        same("planned", part(input_ids=batch(1)).logits, whole(input_ids=batch(1)).logits)
    part.save_pretrained(folder / "again")
    dist.barrier()
    saved = load_file(folder / "again/model.safetensors")
    assert saved.keys() == load_file(folder / "whole/model.safetensors").keys()
    for name, x in whole.state_dict().items():
        if name in saved:
            same(name, saved[name], x)


def run_cases(rank: int, cases: list[tuple[Any, ...]], folder: Path, found: Any) -> None:
    for label, mixers, tensor, context, options in cases:
        compare(label, mixers, tensor, context, **options)
    if not cases:
        planned(rank, folder)


SMALL = ["gated_deltanet", "mamba2", "rwkv7", "attention"]
DEFAULT = [
    ("causal", SMALL[:2], 2, 1, {}),
    ("fsdp2, vocabulary whole", SMALL[2:], 2, 1, {"vocab_size": VOCABULARY + 1}),
]
TWO = [
    ("every mixer, causal", EVERY_MIXER, 2, 1, {"hidden_size": 32}),
    ("options", OPTIONS, 2, 1, {"tie_word_embeddings": False}),
]
FOUR = [("fsdp2", SMALL, 2, 1, {}), ("context", SMALL, 2, 2, {}), ("four", SMALL, 4, 1, {})]
