"""Losses of a vocabulary in two shards, on two processes, against the whole: by plain torch and by
the Triton kernels under Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.kernels.loss.test_shard
"""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from slipstream.compiler import compiler_state
from slipstream.kernels.loss import shard
from slipstream.kernels.loss.reference import LossInputs
from slipstream.ops.loss import cross_entropy, linear_cross_entropy
from slipstream.runtime import guarded_launch
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support.interpreted import error, run

RANKS, V = 2, 37 * 2
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.2, "z_loss": 0.01},
    {"softcap": 2.0, "logit_scale": -0.5, "label_smoothing": 0.1, "z_loss": 0.1},
]


@pytest.mark.skipif(not (HAVE_TRITON and dist.is_available()), reason="wants Triton and gloo")
def test_sharded_losses_match_whole() -> None:
    run(script="tests.kernels.loss.test_shard")


@pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="wants Triton, not interpreted")
@pytest.mark.parametrize("fate", ["dies", "wrong"])
def test_a_failing_kernel_gives_way_to_plain_torch(
    fate: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    here = compiler_state.CompilerState("sm_90", "3.6.0", "1.2.3")
    monkeypatch.setattr(guarded_launch, "compiler_state", lambda device: here)

    def planted(plain: Callable) -> Callable:
        def launch(*args: Any) -> Any:
            if fate == "dies":
                raise guarded_launch.Unusable("planted_kernel: the compiler's process died")
            out = plain(*args)
            return out * 1.2 if isinstance(out, Tensor) else [x * 1.2 for x in out]

        return launch

    monkeypatch.setattr(shard, "_columns", planted(shard.eager_columns))
    monkeypatch.setattr(shard, "_dlogits", planted(shard.eager_dlogits))
    logits, target = torch.randn(6, 10), torch.randint(0, 20, (6,))
    terms, part = LossInputs(-100, 0.1, 0.0, 0.0, 1.0), shard.Shard(10, 10, 20, None)
    results = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for impl in ("eager", "triton|eager"):
            c = shard.columns(logits, target, terms, part, impl)
            rest = part, torch.ones(6), impl, torch.empty(6, 10)
            results.append((*c, shard.dlogits(logits, target, c.lse + 1, terms, *rest)))
    assert all(map(torch.equal, *results))
    assert any("cross_entropy.shard" in str(x.message) for x in said)


def found(given: list[Tensor], target: Tensor, **options: Any) -> list[Tensor]:
    """The loss and the gradients of logits, or of hidden, weight and bias."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    if len(leaves) == 1:
        loss = cross_entropy(leaves[0], target, **options)
    else:
        hidden, weight, bias = leaves
        loss = linear_cross_entropy(hidden, weight, target, bias, **options)
    total = loss.double().square().sum()
    return [loss.detach(), *torch.autograd.grad(total, leaves)]


def check(rank: int, options: dict[str, Any], reduction: str, impl: str) -> None:
    """The same numbers on both ranks, for they have the same seed."""
    logits, target = 4 * torch.randn(2, 9, V), torch.randint(0, V, (2, 9))
    target[0, 1] = target[1, 4] = -100
    if not options:
        logits[0, 0, : V // 2] = -torch.inf
        target[0, 0] = V - 1
    hidden, weight, bias = torch.randn(2, 9, 6), torch.randn(V, 6), torch.randn(V)
    mine = slice(rank * V // RANKS, (rank + 1) * V // RANKS)
    options = {**options, "reduction": reduction}
    ours = {**options, "group": dist.group.WORLD, "impl": impl}

    got = found([logits[..., mine]], target, **ours)
    want = found([logits.double()], target, **options)
    pairs = [(got[0], want[0]), (got[1], want[1][..., mine])]
    got = found([hidden, weight[mine], bias[mine]], target, **ours)
    want = found([x.double() for x in (hidden, weight, bias)], target, **options)
    pairs += [*zip(got[:2], want[:2]), (got[2], want[2][mine]), (got[3], want[3][mine])]
    for i, (x, y) in enumerate(pairs):
        assert error(x, y) < 2e-5, (options, impl, i, error(x, y))


def work(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    for options, reduction in zip(OPTIONS, ("mean", "none", "sum")):
        for impl in ("eager", "triton") if INTERPRETED else ("eager",):
            check(rank, options, reduction, impl)
    dist.destroy_process_group()


def main() -> None:
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (f"{folder}/store",), nprocs=RANKS)


if __name__ == "__main__":
    main()
