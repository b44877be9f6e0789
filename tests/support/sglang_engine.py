"""SGLang's own files of dispatchers, backends and hooks, as modules, and batches for them. Given
here are the base of its backends, which holds the pools, and the convolution, which leaves its
input. Absent is what asks about devices and settings, and whatever else these files import."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slipstream.integrations import sglang, sglang_functions
from tests.support.engines import Absent, loaded
from tests.support.serving_calls import HV, SLOTS, Call, H, K, N, T, V

RELEASES = ["sglang-0.5.23", "sglang-0.5.16"]
FOLDER = "sglang.srt.layers.attention.linear"
OTHERS = ["sglang.srt.layers.attention.mamba.mamba", f"{FOLDER}.lightning_backend"]
OTHERS += ["sglang.kernels.ops.attention.linear.seg_la"]
NAMES = {"gdn": "GDNAttnBackend", "kda": "KDAAttnBackend"}
WIDTH = 3  # tokens that the convolution keeps


class Base:
    """In the place of MambaAttnBackendBase."""

    accept_lens_pool = None
    tracked: Any = None

    def __init__(self, runner: Any) -> None:
        self.req_to_token_pool, self.device = runner.req_to_token_pool, "cpu"

    def _track_mamba_state_decode(self, *args: Any) -> None:
        pass

    def _track_mamba_state_extend(
        self, batch: Any, h: Any, states: Tensor, metadata: Any, *, h_track_buf: Any = None
    ) -> None:
        self.tracked = h, h_track_buf


def convolved(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return x


def theirs_of_mamba(name: str) -> Any:
    """A function of Mamba-2 of SGLang's, which says that it was asked."""

    def function(*args: Any, **options: Any) -> str:
        return f"SGLang's {name}"

    return function


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """SGLang's fused_gdn_gating."""
    g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    return g[None], b.sigmoid()[None]


class Speculative:
    """A layer's caches: MambaPool.SpeculativeState, or the ones without drafts."""

    replayssm_d = replayssm_k = replayssm_g = replayssm_rawv = None

    def __init__(self, call: Call) -> None:
        self.conv = [torch.zeros(SLOTS, WIDTH, 2 * H * K + HV * V)]
        self.temporal, self.intermediate_ssm = call.states, call.buffer
        self.intermediate_conv_window = [torch.zeros(SLOTS, T, WIDTH, 2 * H * K + HV * V)]


@contextmanager
def engine_of(release: str) -> Iterator[SimpleNamespace]:
    """Its modules, as the fixture of the tests hands them on."""
    conv = {"causal_conv1d_fn": convolved, "causal_conv1d_update": convolved}
    gating = {"fused_gdn_gating": gates}
    attention = "sglang__kernels__ops__attention"
    srt = "sglang__srt__layers__attention"
    given: dict[str, Any] = {
        "sglang__kernels__ops__mamba__causal_conv1d_triton": conv,
        f"{attention}__fla__fused_gdn_gating": gating,
        f"{attention}__linear__fused_gdn_gating": gating,
        f"{attention}__fla__chunk_delta_h": {"CHUNK_SIZE": 64},
        f"{srt}__hybrid_linear_attn_backend": {
            "MambaAttnBackendBase": Base,
            "Mamba2AttnBackend": type("Mamba2AttnBackend", (), {}),
        },
        "sglang__srt__mem_cache__memory_pool": {
            "MambaPool": SimpleNamespace(State=Speculative, SpeculativeState=Speculative)
        },
        "sglang__kernels__ops__mamba__triton_ops": {
            name: theirs_of_mamba(name)
            for name in ("mamba_chunk_scan_combined", "selective_state_update")
        },
        "sglang__srt__utils__common": {"get_eager_max_batch_size": lambda size: size},
    }
    files = [f"{FOLDER}.{x}" for x in ("gdn_backend", "kda_backend", "utils", "kernels")]
    files += ["sglang.srt.plugins.hook_registry", "sglang.srt.configs.linear_attn_model_registry"]
    files += ["sglang.srt.plugins", *OTHERS]
    sglang._backend.cache_clear()
    sglang_functions._backend.cache_clear()
    with loaded(release, *files, **given) as found:
        gdn, kda, utils, _, hooks, registry, plugins, *_ = found
        triton = utils.LinearAttnKernelBackend.TRITON
        for name in ("decode", "prefill"):  # 0.5.16 asks for the command line's
            for module in (gdn, kda):
                setattr(module, f"get_linear_attn_{name}_backend", lambda: triton)
        yield SimpleNamespace(
            release=release,
            modules={"gdn": gdn, "kda": kda},
            hooks=hooks,
            plugins=plugins,
            registry=registry,
            backends=SimpleNamespace(decode=triton, prefill=triton, verify=triton),
        )
    sglang._backend.cache_clear()
    sglang_functions._backend.cache_clear()


def runner(engine: SimpleNamespace, cache: Speculative) -> Any:
    conv = [cache.conv[0].mT]
    pool = SimpleNamespace(
        size=SLOTS,
        mamba_pool=SimpleNamespace(mamba_cache=SimpleNamespace(conv=conv)),
        mamba2_layer_cache=lambda layer: cache,
    )
    return SimpleNamespace(
        req_to_token_pool=pool,
        linear_attn_backends=engine.backends,
        device="cpu",
        server_args=Absent(),
    )


def built(engine: SimpleNamespace, call: Call, cls: Any, **metadata: Any) -> Any:
    """A backend for a call, with the metadata of its batch."""
    backend = cls(runner(engine, Speculative(call)))
    none = dict.fromkeys(
        ("replayssm_write_pos", "replayssm_force_flush", "retrieve_next_token", "track_chunk_idx",
         "retrieve_next_sibling", "retrieve_parent_token", "logical_num_tokens",
         "state_checkpoint_cu_starts", "state_checkpoint_indices", "track_ssm_h_batch_src",
         "track_ssm_h_src", "conv_block_table"), None
    )  # fmt: skip
    none |= {"num_state_checkpoints": 0, "state_checkpoint_every_n_tokens": 0}
    none |= {"query_start_loc": call.offsets, "mamba_cache_indices": call.slots}
    backend.forward_metadata = SimpleNamespace(
        **{**none, "has_mamba_track_mask": False, **metadata}
    )
    backend.enable_mis = False
    return backend


def layer(call: Call, lower_bound: float | None) -> SimpleNamespace:
    weight = torch.zeros(2 * H * K + HV * V, WIDTH + 1)
    return SimpleNamespace(
        layer_id=0, A_log=call.A_log, dt_bias=call.dt_bias, lower_bound=lower_bound,
        q_dim=H * K, k_dim=H * K, v_dim=HV * V, head_q_dim=K, head_k_dim=K, head_v_dim=V,
        num_q_heads=H, num_k_heads=H, num_v_heads=HV, bias=None, activation="silu",
        conv_weights=weight, q_conv_weights=weight, k_conv_weights=weight, v_conv_weights=weight,
    )  # fmt: skip


def mixed(call: Call) -> Tensor:
    """What the convolution is given: q, k and v [tokens, 2 H K + HV V]."""
    return torch.cat([x[0].flatten(1) for x in (call.q, call.k, call.v)], -1)


def batch(call: Call, **mode: bool) -> SimpleNamespace:
    modes = {"is_target_verify": False, "is_draft_extend_v2": False, **mode}
    return SimpleNamespace(
        forward_mode=SimpleNamespace(**{k: (lambda v=v: v) for k, v in modes.items()}),
        spec_info=SimpleNamespace(draft_token_num=T, ragged_verify_layout=None),
        batch_size=N,
        req_pool_indices=torch.arange(N),
        extend_prefix_lens=torch.zeros(N),
        extend_seq_lens_cpu=call.offsets.diff().tolist(),
    )


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=2e-5, rtol=2e-5)
