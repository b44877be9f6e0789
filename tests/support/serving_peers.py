"""slipstream.integrations beside the engines' own Triton functions, as tests/engines runs it.

TRITON_INTERPRET=1 python -m tests.support.serving_peers vllm-0.33.0     a release in .engines

On a GPU the same without TRITON_INTERPRET; SGLang's prefill is compared there alone, since the
interpreter has not what it calls. Of the engines their functions are run; what these ask about the
device is answered here.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.integrations import sglang_functions, vllm
from slipstream.integrations.sglang import GDNKernel, KDAKernel
from slipstream.runtime.backends import INTERPRETED
from tests.support.engines import loaded
from tests.support.serving_calls import HV, Call, K, V

Run = Callable[[], Any]
ANSWERS = {"get_device_sm": lambda: 90, "torch_release": (2, 13)}


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


def of_sglang(release: str) -> None:
    folder = "sglang.kernels.ops.attention"
    fused = "linear.fused_sigmoid_gating_recurrent"
    if release == "sglang-0.5.16":
        fused = "fla.fused_sigmoid_gating_recurrent"
    given: dict[str, Any] = {"sglang__srt__utils": ANSWERS, "sglang__srt__utils__common": ANSWERS}
    given["einops"] = {"rearrange": flattened}
    files = [f"{folder}.{fused}", f"{folder}.fla", f"{folder}.linear.seg_la"]
    files.append("sglang.kernels.ops.mamba.triton_ops")
    if INTERPRETED:
        torch.cpu.device = lambda index: nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
        # the first of the tiles that 0.5.23 would time
        triton.runtime.autotuner.Autotuner._bench = lambda *args, **more: [0.0] * 3
    with loaded(release, *files, **given) as (module, _, seg_la, _):
        compare_sglang(release, module.fused_sigmoid_gating_delta_rule_update)
        compare_sglangs_mamba()
        compare_sglangs_lightning(seg_la)


def flattened(x: Tensor, pattern: str, n: int = 0) -> Tensor:
    """What SGLang's scan of Mamba-2 asks of einops."""
    return x.unflatten(-1, (-1, n)) if n else x.flatten(-2)


def compare_pools(name: str, pools: list[Tensor], ours: Run, theirs: Run) -> None:
    """What two calls return and leave in pools."""
    before, results = [x.clone() for x in pools], []
    for call in (theirs, ours):
        results.append([call(), *(x.clone() for x in pools)])
        for x, y in zip(pools, before):
            x.copy_(y)
    for i, (want, got) in enumerate(zip(*results)):
        show(f"{name}, {i}", got, want, 1e-5)


def compare_sglangs_mamba() -> None:
    """A token, drafts in a chain, and prompts that begin where SGLang's chunks do."""
    folder = "sglang.kernels.ops.mamba.triton_ops"
    update = import_module(f"{folder}.mamba_ssm").selective_state_update
    scan = import_module(f"{folder}.ssd_combined").mamba_chunk_scan_combined
    N, H, P, G, S, T = 3, 2, 16, 1, 32, 2
    A, D, bias = -torch.rand(H) - 0.1, torch.randn(H), torch.randn(H)
    wide = {"A": A[:, None, None].expand(H, P, S), "D": D[:, None].expand(H, P)}
    wide |= {"dt_bias": bias[:, None].expand(H, P)}
    pool, buffer = torch.randn(5, H, P, S), torch.ones(N, T, H, P, S)
    given: dict[str, Any] = {"state": pool, "dt_softplus": True, **wide}
    given["state_batch_indices"] = torch.tensor([3, 0, 2], dtype=torch.int32)
    for name, shape in (("token", (N,)), ("drafts", (N, T))):
        x, dt = torch.randn(*shape, H, P), torch.randn(*shape, H)[..., None].expand(*shape, H, P)
        tokens: dict[str, Any] = {"x": x, "dt": dt, "out": torch.zeros_like(x)}
        tokens |= {n: torch.randn(*shape, G, S) for n in "BC"}
        if name == "drafts":
            tokens |= {"disable_state_update": True, "intermediate_states_buffer": buffer}
            tokens |= {"intermediate_state_indices": torch.tensor([2, 1, 0], dtype=torch.int32)}
            tokens["cache_steps"] = T

        def run(function: Any, tokens: Any = tokens) -> Tensor:
            function(**given, **tokens)
            return tokens["out"].clone()

        compare_pools(
            f"Mamba-2 {name}",
            [pool, buffer],
            lambda run=run: run(sglang_functions.selective_state_update),
            lambda run=run: run(update),
        )
    offsets = torch.tensor([0, 64, 128], dtype=torch.int32)
    given = {"x": torch.randn(1, 128, H, P), "dt": torch.randn(1, 128, H), "A": A, "D": D}
    given |= {n: torch.randn(1, 128, G, S) for n in "BC"}
    given |= {"dt_bias": bias, "dt_softplus": True, "chunk_size": 64, "cu_seqlens": offsets}
    given |= {"initial_states": torch.randn(2, H, P, S), "out": torch.ones(1, 128, H, P)}
    given |= {"seq_idx": (torch.arange(128)[None] // 64).int(), "return_varlen_states": True}
    given |= {"chunk_indices": torch.arange(2).int(), "chunk_offsets": torch.zeros(2).int()}
    given |= {"return_intermediate_states": True, "state_dtype": torch.float32}
    compare_pools(
        "Mamba-2 prompts",
        [given["out"]],
        lambda: sglang_functions.mamba_chunk_scan_combined(**given)[1],
        lambda: scan(**given)[1],
    )


def compare_sglangs_lightning(seg_la: Any) -> None:
    """Tokens, drafts and prompts, of which one goes on from a state."""
    H, D = 1, 128
    pool, buffer, slopes = torch.randn(5, H, D, D), torch.ones(3, 2, H, D, D), torch.rand(H) / 2
    for name, lengths in (("tokens", [1, 1, 1]), ("drafts", [2, 2, 2]), ("prompts", [40, 3, 2])):
        q, k, v = (torch.randn(sum(lengths), H, D) for _ in range(3))
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        meta = seg_la.SegLaMeta(
            batch_size=3,
            max_q_length=None,
            q_offsets=offsets,
            s_offsets=torch.tensor([3, 0, 2], dtype=torch.int32),
            q_lengths=offsets.diff(),
            s_scales=torch.tensor([1, 0, 1]) if name == "prompts" else torch.ones(3),
        )
        more: dict[str, Any] = {"meta": meta}
        if name == "drafts":
            more |= {"caches": buffer, "cache_indices": torch.tensor([2, 0, 1], dtype=torch.int32)}
        given = (q, k, v, pool, slopes)
        compare_pools(
            f"lightning attention's {name}",
            [pool, buffer],
            lambda given=given, more=more: sglang_functions.seg_la_fwd(*given, **more),
            lambda given=given, more=more: seg_la.seg_la_fwd(*given, **more),
        )


def compare_sglang(release: str, update: Callable[..., Any]) -> None:
    is_older = release == "sglang-0.5.16"  # no bound, no stride between states

    def made(call: Call) -> Call:
        call.states = call.states.contiguous() if is_older else call.states
        return call

    for kernel, is_kda, lower_bound in (
        (GDNKernel(), False, None),
        (KDAKernel(), True, None),
        (KDAKernel(), True, -5.0),
    ):
        if is_older and lower_bound:
            continue
        kind = type(kernel).__name__ + (" bounded" if lower_bound else "")
        more: dict[str, Any] = {"lower_bound": lower_bound} if lower_bound else {}
        call = made(Call.decode(is_kda))
        compare(
            f"{kind} decode",
            call,
            lambda kernel=kernel, call=call, more=more: kernel.decode(**call.sglang(), **more),
            lambda call=call, more=more, is_kda=is_kda: update(
                **call.sglang_function(), is_kda=is_kda, **more
            ),
            1e-5,
        )
        call = made(Call.verify(is_kda))
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
    chunk = import_module("sglang.kernels.ops.attention.fla.chunk")
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


def of_vllm(release: str) -> None:
    torch.accelerator.device_index = lambda index: nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    files = ["vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating"]
    files += ["vllm.third_party.flash_linear_attention.ops.op"]
    files += ["vllm.model_executor.layers.mamba.ops"]
    given: dict[str, Any] = {
        "vllm__triton_utils": {"tl": tl, "triton": triton, "HAS_TRITON": True},
        "vllm__v1__attention__backends__utils": {"NULL_BLOCK_ID": 0},
    }
    with loaded(release, *files, **given) as (gating, *_):
        ssm: Any = import_module("vllm.model_executor.layers.mamba.ops.mamba_ssm")
        ssm.try_get_optimal_ssm_config = lambda *args: (16, 1)
        compare_vllm(gating.fused_sigmoid_gating_delta_rule_update, ssm.selective_state_update)


def compare_vllm(update: Callable[..., Any], update_states: Callable[..., Any]) -> None:
    for is_kda in (False, True):
        calls = {"decode": Call.decode(is_kda, 1)}
        if not is_kda:  # theirs reads the gates of later tokens where those of a head are
            calls["verify"] = Call.drafts(is_kda)
        for name, call in calls.items():
            given = {**call.vllm(), "is_kda": is_kda}
            compare(
                f"delta_rule_update {name}, kda {is_kda}",
                call,
                lambda given=given: vllm.delta_rule_update(**given)[0],
                lambda given=given: update(**given)[0],
                1e-5,
            )
    for name, terms, options in mamba_calls():
        want, got = (torch.zeros_like(terms["x"]) for _ in range(2))
        pool = terms["state"]
        before = pool.clone()
        update_states(**terms, **options, out=want)
        left = pool.clone()
        pool.copy_(before)
        vllm.selective_state_update(**terms, **options, out=got)
        sources = options["state_batch_indices"]
        valid = slice(None) if sources.dim() == 2 else sources > 0
        show(f"selective_state_update, {name}", got[valid], want[valid], 1e-5)
        show(f"selective_state_update, {name}, pool", pool, left, 1e-5)


def mamba_calls() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """A token of each sequence, to other blocks, drafts, and tokens without drafts."""
    one = torch.tensor([5, 0, 2], dtype=torch.int32)
    drafts = torch.tensor([[5, 1, 2], [3, 4, 6], [7, 8, 0]], dtype=torch.int32)
    elsewhere = torch.tensor([[9, 1, 10], [3, 4, 6], [7, 11, 0]], dtype=torch.int32)
    offsets = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    accepted = {"num_accepted_tokens": torch.tensor([2, 1, 1], dtype=torch.int32)}
    rows: list[tuple[str, Tensor, Tensor, dict[str, Any]]] = [
        ("a token", one, one, {}),
        ("to other blocks", one, torch.tensor([7, 0, 2], dtype=torch.int32), {}),
        ("drafts", drafts, drafts, {**accepted, "cu_seqlens": offsets}),
        ("drafts to other blocks", drafts, elsewhere, {**accepted, "cu_seqlens": offsets}),
        ("tokens", drafts, drafts, {"cu_seqlens": offsets}),
    ]
    calls = []
    for name, source, target, more in rows:
        tokens = int(offsets[-1]) if more else 3
        A = -torch.rand(HV)[:, None, None].expand(HV, V, K)
        dt, bias, D = (torch.randn(*n, HV, 1).expand(*n, HV, V) for n in ((tokens,), (), ()))
        B, C = torch.randn(2, tokens, 1, K).unbind()
        terms = {"state": torch.randn(12, HV, V, K), "x": torch.randn(tokens, HV, V), "dt": dt}
        terms |= {"A": A, "B": B, "C": C, "D": D, "dt_bias": bias}
        blocks = {"state_batch_indices": source, "dst_state_batch_indices": target}
        calls.append((name, terms, {"dt_softplus": True, **blocks, **more}))
    return calls


if __name__ == "__main__":
    if not INTERPRETED:
        torch.set_default_device("cuda")
    torch.manual_seed(0)
    {"sglang": of_sglang, "vllm": of_vllm}[sys.argv[1].partition("-")[0]](sys.argv[1])
