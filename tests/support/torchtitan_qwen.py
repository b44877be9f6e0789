"""torchtitan's Qwen3.5 of its own files, small, with and without slipstream's overrides."""

import ast
import sys
import unittest
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn.attention.flex_attention import create_mask

from slipstream.compat import install
from slipstream.integrations import report
from tests.support.engines import folder, loaded
from tests.support.torchtitan_on_a_cpu import claim_cpu

RELEASE, SPMD_TYPES = "torchtitan-0.3.0", "spmd_types-0.2.3"
OURS = "slipstream.integrations.torchtitan"
ROWS, TOKENS, VOCABULARY = 2, 64, 32
NO_PICTURES = {"image_id": VOCABULARY, "video_id": VOCABULARY}
FILES = ["torchtitan.config.override", "torchtitan.models.qwen3_5", "torchtitan.distributed"]
FILES += ["torchtitan.models.common.attention", "torchtitan.models.qwen3_5.model"]


def by_mask(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float, enable_gqa: bool, **_: Any
) -> tuple[Tensor, None]:
    """flex_attention, which has no gradient on a CPU, with the whole mask."""
    mask = create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], device="cpu")
    options = {"attn_mask": mask, "scale": scale, "enable_gqa": enable_gqa}
    return F.scaled_dot_product_attention(q, k, v, **options), None


@contextmanager
def torchtitan() -> Iterator[SimpleNamespace]:
    """Its modules. What torch.compile would make of masks and of its attention runs uncompiled."""
    sys.path.insert(0, str(folder(SPMD_TYPES)))
    try:
        with install("fla"), loaded(RELEASE, "torchtitan", *FILES) as found:
            modules: list[Any] = found
            _, override, qwen, distributed, attention, model = modules
            attention._compiled_create_block_mask = attention.create_block_mask
            attention.FlexAttention._compiled_flex_attn = staticmethod(by_mask)
            names = SimpleNamespace(
                override=override,
                qwen=qwen,
                attention=attention,
                distributed=distributed,
                model=model,
                config=sys.modules["torchtitan.config"],
                utils=sys.modules["torchtitan.distributed.utils"],
            )
            names.utils.set_spmd_backend("partial_dtensor")
            # of which a model asks whether it is the one that reads configurations
            trainer: Any = ModuleType("torchtitan.trainer")
            trainer.Trainer = SimpleNamespace(Config=type("Config", (), {}))
            sys.modules["torchtitan.trainer"] = trainer
            yield names
    finally:
        sys.path.remove(str(folder(SPMD_TYPES)))
        for name in [x for x in sys.modules if x == OURS or x.partition(".")[0] == "spmd_types"]:
            del sys.modules[name]


def config_of(titan: SimpleNamespace) -> Any:
    """A layer of attention and three of Gated DeltaNet; without weights for pictures."""
    spec = titan.qwen.model_registry("debugmodel")
    made = spec.model
    made.layers, made.vocab_size = made.layers[:4], VOCABULARY
    made.tok_embeddings.num_embeddings = made.lm_head.out_features = VOCABULARY
    made.vision_encoder.num_layers = 1
    return spec


def overridden(titan: SimpleNamespace, spec: Any, names: tuple[str, ...]) -> list[str]:
    """torchtitan's application of overrides to a trainer's configuration; its log."""
    root = SimpleNamespace(traverse=lambda cls: spec.traverse(cls))
    imports = [f"{OURS}.{x}" for x in names]
    return titan.override.apply_overrides(titan.override.OverrideConfig(imports=imports), root)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [ROWS, TOKENS], their positions in two documents a row, and weights of the loss."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    starts = [(0, 30), (0, 17)]
    rows = [torch.cat([torch.arange(n), torch.arange(TOKENS - n)]) for _, n in starts]
    return tokens, torch.stack(rows), torch.randn(ROWS, TOKENS, VOCABULARY, generator=generator)


def initialised(model: Any) -> Any:
    torch.manual_seed(0)
    model.init_states()
    with torch.no_grad():  # also norms' weights, which begin as 0 and 1
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    return model


def loss_of(model: Any, rows: slice = slice(None)) -> Tensor:
    tokens, positions, weights = (x[rows] for x in inputs())
    masks = model.get_attention_masks(positions)
    logits = model(tokens, attention_masks=masks, positions=positions, special_tokens=NO_PICTURES)
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    ranks = VOCABULARY // logits.shape[-1]
    if ranks > 1:  # each rank has its words, and sums the gradients of all
        logits = torch.cat(all_gather(logits.contiguous()), -1)
    loss = (logits.float().log_softmax(-1) * weights).sum()
    return loss.detach() + (loss - loss.detach()) / ranks


def whole_gradients(model: Any) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            found[name.replace("_checkpoint_wrapped_module.", "")] = grad.clone()
    return found


def on_a_rank(rank: int, shard: int, tensor: int, backend: str, weights: str, queue: Any) -> None:
    """Loss and gradients of two ranks, by torchtitan's own parallelize_fn, and what ran."""
    claim_cpu()
    with torchtitan() as titan:
        spec = config_of(titan)
        config = titan.config
        parallelism = config.ParallelismConfig(
            data_parallel_shard_degree=shard, tensor_parallel_degree=tensor, spmd_backend=backend
        )
        titan.utils.set_spmd_backend(backend)
        dims = titan.distributed.ParallelDims.from_config(parallelism, 2)
        training = config.TrainingConfig(mixed_precision_param="float32", seq_len=TOKENS)
        given = SimpleNamespace(parallelism=parallelism, training=training)
        spec.model.update_from_config(config=given)
        overridden(titan, spec, ("gated_delta_net", "attention", "norm"))
        model = spec.model.build()
        model.load_state_dict(torch.load(weights))
        checkpoint: Any = import_module("torchtitan.distributed.activation_checkpoint")

        model = spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=training,
            parallelism=parallelism,
            compile_config=config.CompileConfig(),
            ac_config=checkpoint.FullAC.Config(),
            dump_folder="",
        )
        for unit in model.modules():
            if hasattr(unit, "set_force_sum_reduction_for_comms"):
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no other
        context = titan.utils.get_spmd_context(parallel_dims=dims)
        mine = slice(rank, rank + 1) if shard > 1 else slice(None)
        with context():
            loss = loss_of(model, mine)
            loss.backward()
            grads = whole_gradients(model)
            equal = backend == "spmd_types" or has_parity(titan, model)
        total = loss.detach().clone()
        if shard > 1:
            dist.all_reduce(total)
        if rank == 0:
            calls = {x.name: x.calls for x in report().rows if x.library == "torchtitan"}
            torch.save(grads, f"{weights}.gradients")  # more than a queue holds
            queue.put((float(total), calls, equal))


def has_parity(titan: SimpleNamespace, model: Any) -> bool:
    """torchtitan's own test of equal bits of a prompt in batches of any size, for this model. The
    rest of that file needs vLLM on a GPU. It lacks what Qwen3.5 asks for besides: offsets on the
    host, and which tokens are pictures."""
    loss: Any = import_module("torchtitan.components.loss")
    file = folder(RELEASE) / "torchtitan/experiments/rl/tests/test_bitwise_parity.py"
    wanted = {"_build_padded_varlen_metadata", "_varlen_prefill_logprobs"}
    wanted |= {
        "compute_trainer_prefill_logprobs",
        "_assert_logprobs_equal",
        "test_batch_invariance",
    }
    tree = ast.parse(file.read_text())
    found: list[Any] = [
        x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name in wanted
    ]
    assert {x.name for x in found} == wanted
    names: dict[str, Any] = {
        "torch": torch,
        "dist": SimpleNamespace(get_rank=lambda: 0),
        "VarlenMetadata": titan.attention.VarlenMetadata,
        "compute_logprobs": loss.compute_logprobs,
        "IGNORE_INDEX": loss.IGNORE_INDEX,
    }
    exec(compile(ast.Module(found, []), str(file), "exec"), names)

    def call(tokens: Tensor, *, attention_masks: Any, positions: Tensor) -> Tensor:
        host = tuple(attention_masks.cu_seq_q.tolist())
        masks = {
            "quadratic_attention": attention_masks,
            "deltanet": attention_masks._replace(cu_seq_q_host=host),
        }
        given = {"attention_masks": masks, "positions": positions, "special_tokens": NO_PICTURES}
        return model(tokens, **given)

    generator = torch.Generator().manual_seed(2)
    lengths = [int(70 * (1 - i * 0.15)) for i in range(5)]
    members = {x: names[x] for x in ("_assert_logprobs_equal", "test_batch_invariance")}
    members |= {"model": staticmethod(call), "device": "cpu", "attn_backend": "varlen"}
    members["train_context"] = nullcontext
    members["prompt_ids"] = [
        torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths
    ]
    result = unittest.TestResult()
    type("Parity", (unittest.TestCase,), members)("test_batch_invariance").run(result)
    assert result.testsRun == 1
    return result.wasSuccessful()
