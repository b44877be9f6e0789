"""A model of slipstream for torchtitan's trainer: three layers of the gated delta rule, then one of
softmax attention, again and again; FSDP2, and context parallelism over the tokens of each row.

    pip install torchtitan==0.3.0
    PYTHONPATH=examples/torchtitan torchrun --nproc-per-node 8 -m torchtitan.train \\
        --module hybrid --config hybrid_350m --hf_assets_path FOLDER_WITH_A_TOKENIZER

The trainer, its data, optimizers, checkpoints and metrics are torchtitan's. Sequences are cut into
as many parts as parallelism.context_parallel_degree says; FSDP2 shards over these ranks too.
torchtitan 0.3.0 wants a torch with torch.distributed.set_timeout, such as 2.14.1.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops import inductor_compiled_code
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from slipstream import ops
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.parallel import ContextParallel

# What selective checkpointing by operation keeps of a block, as torchtitan's own models have it:
# every second product, and what mixes tokens. Without such a list it keeps nothing.
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.slipstream._linear_forward.default,
    torch.ops.slipstream._softmax_forward.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    inductor_compiled_code,
}


class Hybrid(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """repeats: of three layers of the gated delta rule and one of attention."""

        hidden_size: int = 1024
        num_heads: int = 8
        repeats: int = 6
        vocab_size: int = 32000

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            parallelism = config.parallelism
            if parallelism.tensor_parallel_degree * parallelism.pipeline_parallel_degree > 1:
                raise NotImplementedError(
                    "parallelism: this model has data, FSDP2 and context only"
                )
            # the ranks have a row's tokens in their order
            parallelism.context_parallel_load_balancer = None

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and flops of a token forward and backward: six for each weight but those
            of the embedding, and three times those of states (7 K V a head) and of attention's
            pairs."""
            count = sum(p.numel() for p in model.parameters())
            width = self.hidden_size // self.num_heads
            states = 3 * self.repeats * self.num_heads * 7 * width * width
            pairs = self.repeats * 2 * self.hidden_size * seq_len
            return count, 6 * (count - self.vocab_size * self.hidden_size) + 3 * (states + pairs)

    def __init__(self, config: Config) -> None:
        super().__init__()
        mixers: list[Any] = [*["gated_deltanet"] * 3, "attention"] * config.repeats
        self.lm = SlipstreamForCausalLM(
            SlipstreamConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                num_heads=config.num_heads,
                mixers=mixers,
            )
        )
        self.context: ContextParallel | None = None

    @property
    def layers(self) -> nn.ModuleList:
        return self.lm.model.layers

    def verify_module_protocol(self) -> None:
        """Passes: slipstream's modules are torch's, and are not parallelised by configuration."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        self.lm.init_weights()

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocabulary] of this rank's tokens; their positions the context knows."""
        return self.lm(input_ids=tokens, context=self.context).logits


def parallelize(
    model: Hybrid,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: Any,
    dump_folder: str,
) -> Hybrid:
    if parallel_dims.cp_enabled:
        model.context = ContextParallel(parallel_dims.get_mesh("cp"))
    if ac_config is not None:
        policy = ac_config.build(dump_folder=dump_folder)
        if isinstance(policy, SelectiveAC):
            policy.get_save_ops = lambda: KEPT
        policy.apply(model)
    if compile_config.enable and "model" in compile_config.components:
        for layer in model.layers:
            layer.compile(backend=compile_config.backend)
    if not parallel_dims.fsdp_enabled:
        return model
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    dtypes = training.mixed_precision_param, training.mixed_precision_reduce
    policy = MixedPrecisionPolicy(*(TORCH_DTYPE_MAP[x] for x in dtypes))
    mesh = parallel_dims.get_mesh(names)
    for unit in (*model.layers, model):
        sharded = fully_shard(unit, mesh=mesh, mp_policy=policy)
        # the trainer divides the loss by the tokens of all ranks
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


class Loss(BaseLoss):
    """The sum, of this rank's tokens, which the trainer divides; labels are the next tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        self.fn = self.summed

    @staticmethod
    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        return ops.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )


def trainer_of(flavor: str, model: Hybrid.Config, lr: float = 4e-4) -> Trainer.Config:
    return Trainer.Config(
        model_spec=ModelSpec(
            name="slipstream_hybrid",
            flavor=flavor,
            model=model,
            parallelize_fn=parallelize,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        loss=Loss.Config(),
        optimizer=default_adamw(lr=lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200),
        # the first step compiles kernels, which a graph cannot hold
        training=TrainingConfig(
            local_batch_size=1, seq_len=65536, steps=1000, disable_cuda_graphs=True
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        # this model cuts itself: neither layouts nor types of torchtitan's
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=-1,
            context_parallel_degree=2,
            spmd_backend="partial_dtensor",
        ),
        activation_checkpoint=FullAC.Config(),
        metrics=MetricsProcessor.Config(log_freq=10),
    )


def hybrid_debug() -> Trainer.Config:
    small = Hybrid.Config(hidden_size=64, num_heads=2, repeats=1, vocab_size=256)
    return trainer_of("debug", small)


def hybrid_350m() -> Trainer.Config:
    return trainer_of("350M", Hybrid.Config())


def hybrid_wide() -> Trainer.Config:
    return trainer_of(
        "wide", Hybrid.Config(hidden_size=4096, num_heads=32, repeats=2, vocab_size=128256)
    )
