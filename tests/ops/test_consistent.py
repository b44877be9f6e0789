"""consistent=True: equal bits whatever the batch and the cut, in plain torch and interpreted."""

import pytest
import torch

from slipstream.compiler.trace import trace
from slipstream.ops import attention, chunk_simple_gla
from slipstream.runtime.consistent import consistent, consistent_scope
from slipstream.tools.catalog import Sample
from tests.support import wants
from tests.support.consistent import OPERATORS, attention_differing, differing
from tests.support.interpreted import interpreted
from tests.support.operators import Size, assert_near, budget, with_grads

every_operator = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
# that have gates and norms of their own
RAW = [op for op in OPERATORS if "A_log" in op.takes]
every_raw = pytest.mark.parametrize("op", RAW, ids=lambda op: op.name)


@every_operator
@pytest.mark.parametrize("trials", [5, pytest.param(1000, marks=pytest.mark.slow)])
def test_operator_gives_equal_bits(op: Sample, trials: int) -> None:
    assert differing(op, trials, "eager") == 0


@every_raw
@pytest.mark.parametrize("trials", [5, pytest.param(1000, marks=pytest.mark.slow)])
def test_gates_in_the_operator_give_equal_bits(op: Sample, trials: int) -> None:
    assert differing(op, trials, "eager", raw=True) == 0
    # by default softplus and sigmoid round by where an element lies
    assert differing(op, 5, "eager", raw=True, consistent=False) > 0


def test_lower_bound_gives_equal_bits() -> None:
    (kda,) = (op for op in RAW if op.op == "chunk_kda")
    assert differing(kda, 5, "eager", raw=True, lower_bound=-5.0) == 0


@pytest.mark.parametrize("trials", [10, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"window_size": 50}, {"softcap": 5.0}], ids=str)
def test_attention_gives_equal_bits(trials: int, options: dict) -> None:
    assert attention_differing(trials, "eager", **options) == 0


def test_attention_by_default_depends_on_its_queries() -> None:
    assert attention_differing(10, "eager", consistent=False) > 0


QUICK = [("chunk_simple_gla", 1), ("attention", 1)]


@interpreted
@pytest.mark.parametrize(("name", "trials"), [*QUICK, *((op.name, 10) for op in OPERATORS)])
@pytest.mark.sample(which=lambda name, trials: trials == 1)
def test_kernels_give_equal_bits_interpreted(name: str, trials: int) -> None:
    if name == "attention":
        assert attention_differing(trials, "triton") == 0
        none = torch.zeros(0, 3, 2, 16)
        o, lse = attention(none, none, none, impl="triton", consistent=True, return_lse=True)
        assert o.shape == none.shape and lse.shape == (0, 2, 3)
    else:
        (op,) = (op for op in OPERATORS if op.name == name)
        assert differing(op, trials, "triton") == 0


@every_operator
def test_results_are_near_the_default(op: Sample) -> None:
    for size in (Size(B=2, T=70), Size(B=1, T=70, lengths=(5, 0, 65))):
        args = op.inputs(size)
        want, grads = with_grads(lambda x: list(op(x)), args)
        found, found_grads = with_grads(lambda x: list(op(x, consistent=True)), args)
        assert_near(op, found, want, budget(torch.float32), "output")
        assert_near(op, found_grads, grads, 4 * budget(torch.float32), "gradient")


@every_operator
def test_other_calls_are_refused(op: Sample) -> None:
    args = op.inputs(Size(T=5))
    for options in ({"reverse": True}, {"impl": "reference"}):
        with pytest.raises(NotImplementedError, match="consistent"):
            op(args, consistent=True, **options)
    if "reverse" in op.takes:
        shapes = {**args, "v": args["v"][:, :4]}
        with pytest.raises(ValueError, match="v"):
            op(shapes, consistent=True)


def test_other_attention_is_refused() -> None:
    q = torch.randn(1, 5, 2, 16)
    with pytest.raises(NotImplementedError, match="consistent: want causal"):
        attention(q, q, q, consistent=True, causal=False)
    with pytest.raises(NotImplementedError, match="consistent: want dropout_p=0"):
        attention(q, q, q, consistent=True, dropout_p=0.5)
    with pytest.raises(NotImplementedError, match="implemented with impl='reference'"):
        attention(q, q, q, consistent=True, impl="reference")
    with pytest.raises(NotImplementedError, match="as many keys as queries"):
        attention(q, q[:, :3], q[:, :3], consistent=True)


def test_scope_ends_with_an_error() -> None:
    q = torch.randn(1, 5, 2, 16)

    def call() -> None:
        with consistent():
            assert consistent_scope.on
            chunk_simple_gla(q, q, q, reverse=True)

    with pytest.raises(NotImplementedError, match="reverse"):
        call()
    assert not consistent_scope.on
    with consistent(on=False):
        assert not consistent_scope.on


def test_nothing_and_one_token() -> None:
    for T in (0, 1):
        q = torch.randn(2, T, 2, 16)
        o, state = chunk_simple_gla(q, q, q, output_final_state=True, consistent=True)
        want, final = chunk_simple_gla(q, q, q, output_final_state=True)
        assert state is not None and final is not None
        assert o.shape == want.shape and torch.allclose(o, want) and torch.allclose(state, final)
        assert attention(q, q, q, consistent=True).shape == q.shape


@wants.compiler
@pytest.mark.parametrize("V", [128, 256, 512])
def test_heads_split_for_sm90_are_taken(V: int) -> None:
    def call(device: torch.device) -> object:
        q, k, v = (torch.randn(1, 256, 2, n, device=device).bfloat16() for n in (128, 128, V))
        return chunk_simple_gla(q, k, v, -torch.rand(1, 256, 2, device=device), consistent=True)

    names = {job.name for job in trace(call, "sm_90", False)}
    assert names == {"scalar_decay_chunk_fwd_sm90_kernel"}
