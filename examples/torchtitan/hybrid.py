"""A model of slipstream for torchtitan's trainer: three layers of the gated delta rule, then one of
softmax attention, again and again; FSDP2, and context parallelism over the tokens of each row.

    pip install torchtitan==0.2.2
    PYTHONPATH=examples/torchtitan torchrun --nproc-per-node 8 -m torchtitan.train \\
        --job.config_file examples/torchtitan/hybrid.toml \\
        --model.hf_assets_path FOLDER_WITH_A_TOKENIZER

The trainer, its data, optimizers, checkpoints and metrics are torchtitan's. Sequences are cut into
as many parts as parallelism.context_parallel_degree says; FSDP2 shards over these ranks too.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops import inductor_compiled_code
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.protocols.model import BaseModelArgs, ModelProtocol
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from slipstream import ops
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.parallel import ContextParallel

IGNORED = -100
# What selective checkpointing by operation keeps of a block, as torchtitan's own models have it:
# every second product, and what mixes tokens. Without such a list it keeps nothing.
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.slipstream._linear_forward.default,
    torch.ops.slipstream._softmax_forward.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    inductor_compiled_code,
}


@dataclass
class HybridArgs(BaseModelArgs):
    """repeats: of three layers of the gated delta rule and one of attention."""

    hidden_size: int = 1024
    num_heads: int = 8
    repeats: int = 6
    vocab_size: int = 32000

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        tensor, pipe = (
            job_config.parallelism.tensor_parallel_degree,
            job_config.parallelism.pipeline_parallel_degree,
        )
        if tensor * pipe > 1:
            raise NotImplementedError("parallelism: this model has data, FSDP2 and context only")

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and flops of a token forward and backward: six for each weight but those of
        the embedding, and three times those of states (7 K V a head) and of attention's pairs."""
        count = sum(p.numel() for p in model.parameters())
        width = self.hidden_size // self.num_heads
        states = 3 * self.repeats * self.num_heads * 7 * width * width
        pairs = self.repeats * 2 * self.hidden_size * seq_len
        return count, 6 * (count - self.vocab_size * self.hidden_size) + 3 * (states + pairs)


class Hybrid(ModelProtocol):
    def __init__(self, model_args: HybridArgs) -> None:
        super().__init__(model_args)
        mixers: list[Any] = [*["gated_deltanet"] * 3, "attention"] * model_args.repeats
        config = SlipstreamConfig(
            vocab_size=model_args.vocab_size,
            hidden_size=model_args.hidden_size,
            num_heads=model_args.num_heads,
            mixers=mixers,
        )
        self.model_args = model_args
        self.lm = SlipstreamForCausalLM(config)
        self.context: ContextParallel | None = None

    @property
    def layers(self) -> nn.ModuleList:
        return self.lm.model.layers

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        self.lm.init_weights()

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, attention_masks: Any = None
    ) -> Tensor:
        """Logits [B, T, vocabulary] of this rank's tokens; their positions the context knows."""
        return self.lm(input_ids=tokens, context=self.context).logits


def parallelize(model: Hybrid, parallel_dims: ParallelDims, job_config: JobConfig) -> Hybrid:
    if parallel_dims.cp_enabled:
        model.context = ContextParallel(parallel_dims.get_mesh("cp"))
        # the ranks have a row's tokens in their order
        job_config.parallelism.context_parallel_load_balancer = None
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=KEPT,
            base_folder=job_config.job.dump_folder,
        )
    if compiled:
        for layer in model.layers:
            layer.compile(backend=job_config.compile.backend)
    if not parallel_dims.fsdp_enabled:
        return model
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    training = job_config.training
    dtypes = training.mixed_precision_param, training.mixed_precision_reduce
    policy = MixedPrecisionPolicy(*(TORCH_DTYPE_MAP[x] for x in dtypes))
    mesh = parallel_dims.get_mesh(names)
    for unit in (*model.layers, model):
        sharded = fully_shard(unit, mesh=mesh, mp_policy=policy)
        # the trainer divides the loss by the tokens of all ranks
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


def build_loss(job_config: JobConfig, **kwargs: Any) -> Any:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        """The sum, of this rank's tokens; labels are the next tokens already."""
        return ops.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    return loss


FLAVORS = {
    "debug": HybridArgs(hidden_size=64, num_heads=2, repeats=1, vocab_size=256),
    "350M": HybridArgs(),
    "wide": HybridArgs(hidden_size=4096, num_heads=32, repeats=2, vocab_size=128256),
}

register_train_spec(
    "slipstream_hybrid",
    TrainSpec(
        model_cls=Hybrid,
        model_args=FLAVORS,
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_text_dataloader,
        build_tokenizer_fn=build_hf_tokenizer,
        build_loss_fn=build_loss,
    ),
)
