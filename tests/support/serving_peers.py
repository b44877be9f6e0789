"""slipstream.integrations beside the engines' own Triton functions.

The functions are read from an unpacked wheel, whose packages are not run: what they import of the
rest of the engine is a few answers about the device, which are given here.

TRITON_INTERPRET=1 python -m tests.support.serving_peers sglang DIR     DIR has sglang/
TRITON_INTERPRET=1 python -m tests.support.serving_peers vllm DIR       DIR has vllm/

On a GPU the same without TRITON_INTERPRET; SGLang's prefill is compared there alone, since the
interpreter has not what it calls.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from slipstream.runtime.backends import INTERPRETED
from tests.support.serving_calls import Call

Run = Callable[[], Any]


def packages(root: Path, name: str) -> None:
    """Makes a package and all below it importable without their __init__."""
    for folder in [root / name, *(x for x in (root / name).rglob("*") if x.is_dir())]:
        module = ModuleType(".".join(folder.relative_to(root).parts))
        module.__path__ = [str(folder)]
        sys.modules[module.__name__] = module


def stub(name: str, **values: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(values)
    sys.modules[name] = module


def no() -> bool:
    return False


def show(name: str, got: Tensor, want: Tensor, limit: float) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    print(f"{name}: relative error {error:.1e}, at most {limit:.0e}", flush=True)
    assert error <= limit, name


def compare(name: str, call: Call, ours: Run, theirs: Run, limit: float) -> None:
    """The outputs of both, and what they leave in the pools."""
    pools = [x for x in (call.states, call.buffer) if x is not None]
    before = [x.clone() for x in pools]
    want = theirs()
    left = [x.clone() for x in pools]
    for x, y in zip(pools, before):
        x.copy_(y)
    got = ours()
    valid = call.valid_rows(got.shape[1])
    show(name, got[:, valid], want[:, valid], limit)
    for i, (x, y) in enumerate(zip(pools, left)):
        show(f"{name}, pool {i}", x, y, limit)


def of_sglang(root: Path) -> None:
    packages(root, "sglang")
    release = (2, 13)
    stub("einops", rearrange=None)
    stub("sglang.kernels.jit.utils", is_arch_support_pdl=no)
    answers = {"get_device_sm": lambda: 90, "is_cuda": no, "is_hip": no, "is_npu": no}
    answers |= {"is_cpu": no, "is_xpu": no, "is_musa": no}
    answers |= {"is_gfx95_supported": no, "is_sm100_supported": no, "is_sm90_supported": no}
    stub("sglang.srt.utils", **answers)
    stub("sglang.srt.utils.common", torch_release=release, **answers)
    folder = "sglang.kernels.ops.attention"
    fused = import_module(f"{folder}.linear.fused_sigmoid_gating_recurrent")
    update = fused.fused_sigmoid_gating_delta_rule_update
    from slipstream.integrations.sglang import GDNKernel, KDAKernel

    for kernel, is_kda, lower_bound in (
        (GDNKernel(), False, None),
        (KDAKernel(), True, None),
        (KDAKernel(), True, -5.0),
    ):
        kind = type(kernel).__name__ + (" bounded" if lower_bound else "")
        more: dict[str, Any] = {"lower_bound": lower_bound} if is_kda else {}
        call = Call.decode(is_kda)
        compare(
            f"{kind} decode",
            call,
            lambda kernel=kernel, call=call, more=more: kernel.decode(**call.sglang(), **more),
            lambda call=call, more=more, is_kda=is_kda: update(
                **call.sglang_function(), is_kda=is_kda, **more
            ),
            1e-5,
        )
        call = Call.verify(is_kda)
        compare(
            f"{kind} verify",
            call,
            lambda kernel=kernel, call=call, more=more: kernel.target_verify(
                **call.sglang(), **call.sglang_verify(), **more
            ),
            lambda call=call, more=more, is_kda=is_kda: update(
                **call.sglang_function(),
                **call.sglang_verify(),
                disable_state_update=True,
                is_kda=is_kda,
                **more,
            ),
            1e-5,
        )
    if INTERPRETED:
        return
    chunk = import_module(f"{folder}.fla.chunk")
    call = Call.prefill(False, torch.bfloat16)
    given = call.sglang_prefill()
    compare(
        "GDNKernel extend",
        call,
        lambda: GDNKernel().extend(**given)[0],
        lambda: chunk.chunk_gated_delta_rule(
            given["q"],
            given["k"],
            given["v"],
            given["g"],
            given["beta"],
            initial_state=given["ssm_states"],
            initial_state_indices=given["cache_indices"],
            cu_seqlens=given["query_start_loc"],
            use_qk_l2norm_in_kernel=True,
        )[0],
        3e-2,
    )


def of_vllm(root: Path) -> None:
    import triton.language as tl

    packages(root, "vllm")
    stub("vllm.triton_utils", tl=tl, triton=triton, HAS_TRITON=True)
    platform = ModuleType("platform")
    platform.is_cpu = platform.is_rocm = platform.is_xpu = no  # pyright: ignore[reportAttributeAccessIssue]
    platform.is_device_capability_family = lambda x: False  # pyright: ignore[reportAttributeAccessIssue]
    stub("vllm.platforms", current_platform=platform)
    stub("vllm.envs")
    stub("vllm._custom_ops")
    stub("vllm.logger", init_logger=lambda name: __import__("logging").getLogger(name))
    stub("vllm.utils.platform_utils", get_device_name_as_file_name=lambda: "cpu")
    stub("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0)
    torch.accelerator.device_index = lambda index: nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    gating = "vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating"
    update = import_module(gating).fused_sigmoid_gating_delta_rule_update
    ssm: Any = import_module("vllm.model_executor.layers.mamba.ops.mamba_ssm")
    ssm.try_get_optimal_ssm_config = lambda *args: (16, 1)
    from slipstream.integrations import vllm

    for is_kda in (False, True):
        calls = {"decode": Call.decode(is_kda, 1)}
        if not is_kda:  # theirs reads the gates of later tokens where those of a head are
            calls["verify"] = Call.drafts(is_kda)
        for name, call in calls.items():
            given = {**call.vllm(), "is_kda": is_kda, "use_qk_l2norm_in_kernel": True}
            compare(
                f"delta_rule_update {name}, kda {is_kda}",
                call,
                lambda given=given: vllm.delta_rule_update(**given)[0],
                lambda given=given: update(**given)[0],
                1e-5,
            )
    call, given = Call.mamba()
    want, got = (torch.zeros_like(given["x"]) for _ in range(2))
    before = call.states.clone()
    ssm.selective_state_update(**given, out=want)
    left = call.states.clone()
    call.states.copy_(before)
    vllm.selective_state_update(**given, out=got)
    valid = given["state_batch_indices"] > 0
    show("selective_state_update", got[valid], want[valid], 1e-5)
    show("selective_state_update, pool", call.states, left, 1e-5)


if __name__ == "__main__":
    if not INTERPRETED:
        torch.set_default_device("cuda")
    {"sglang": of_sglang, "vllm": of_vllm}[sys.argv[1]](Path(sys.argv[2]).resolve())
