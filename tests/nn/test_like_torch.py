"""Modules that torch.nn has too: its arguments, its parameters' names, its numbers; the rest beside
the operators that they call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import nn, ops
from slipstream.kernels.elementwise.place_tokens import place_tokens
from slipstream.layers.call import MixerCall
from slipstream.nn import projections
from slipstream.nn.linear import plain_linear
from slipstream.runtime.consistent import BlockStep, consistent
from tests.support.small_modules import MODULES, flat

D = 12
COMPILED = ("RMSNorm", "SwiGLU", "ShortConvolution", "Linear", "RotaryEmbedding")
COMPILED += ("LinearCrossEntropyLoss",)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, D)


# name, torch's, ours, inputs
CASES: list[tuple[str, Callable[[], Any], Callable[[], Any], Callable[[], tuple]]] = [
    ("RMSNorm", lambda: torch.nn.RMSNorm(D), lambda: nn.RMSNorm(D), lambda: (rows(2, 5),)),
    ("RMSNorm-eps", lambda: torch.nn.RMSNorm([D], 0.1), lambda: nn.RMSNorm([D], 0.1),
     lambda: (rows(5),)),
    ("RMSNorm-bare", lambda: torch.nn.RMSNorm(D, elementwise_affine=False),
     lambda: nn.RMSNorm(D, elementwise_affine=False), lambda: (rows(5),)),
    ("LayerNorm", lambda: torch.nn.LayerNorm(D), lambda: nn.LayerNorm(D), lambda: (rows(2, 5),)),
    ("LayerNorm-no-bias", lambda: torch.nn.LayerNorm(D, bias=False),
     lambda: nn.LayerNorm(D, bias=False), lambda: (rows(5),)),
    ("GroupNorm", lambda: torch.nn.GroupNorm(3, D), lambda: nn.GroupNorm(3, D),
     lambda: (rows(5),)),
    ("Linear", lambda: torch.nn.Linear(D, 7), lambda: nn.Linear(D, 7), lambda: (rows(2, 5),)),
    ("Linear-one-row", lambda: torch.nn.Linear(D, 7, bias=False),
     lambda: nn.Linear(D, 7, bias=False), lambda: (rows(),)),
    ("Embedding", lambda: torch.nn.Embedding(9, D), lambda: nn.Embedding(9, D),
     lambda: (torch.randint(0, 9, (2, 5)),)),
    ("CrossEntropyLoss", lambda: torch.nn.CrossEntropyLoss(ignore_index=3, label_smoothing=0.1),
     lambda: nn.CrossEntropyLoss(ignore_index=3, label_smoothing=0.1),
     lambda: (rows(9), torch.randint(0, D, (9,)))),
]  # fmt: skip
if hasattr(torch.nn, "LinearCrossEntropyLoss"):  # torch 2.13
    CASES.append((
        "LinearCrossEntropyLoss",
        lambda: torch.nn.LinearCrossEntropyLoss(D, 9, bias=True, reduction="sum"),
        lambda: nn.LinearCrossEntropyLoss(D, 9, bias=True, reduction="sum"),
        lambda: (rows(5), torch.randint(0, 9, (5,))),
    ))  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_module_loads_torch_state_dict(case: tuple) -> None:
    _, theirs, ours, inputs = case
    torchs, mine, given = theirs(), ours(), inputs()
    for p in torchs.parameters():
        torch.nn.init.normal_(p)
    mine.load_state_dict(torchs.state_dict())
    assert list(mine.state_dict()) == list(torchs.state_dict())
    want, got = torchs(*given), mine(*given)
    torch.testing.assert_close(got, want)
    if parameters := list(torchs.parameters()):
        grads = [
            torch.autograd.grad(y.square().sum(), list(module.parameters()))
            for y, module in ((want, torchs), (got, mine))
        ]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
        assert parameters[0].shape == next(mine.parameters()).shape


def test_further_arguments_are_keyword_only() -> None:
    """Where torch's module has an argument that ours has not, none of ours moves up."""
    for make in (lambda: nn.Embedding(9, D, 0), lambda: nn.CrossEntropyLoss(torch.ones(D))):  # pyright: ignore
        with pytest.raises(TypeError, match="positional argument"):
            make()


def test_short_convolution_loads_conv1ds_state_dict() -> None:
    theirs = torch.nn.Conv1d(D, D, 4, groups=D, padding=3)
    ours = nn.ShortConvolution(D, 4, bias=True, activation=None)
    ours.load_state_dict(theirs.state_dict())
    x = rows(2, 9)
    torch.testing.assert_close(ours(x)[0], theirs(x.mT)[..., :9].mT)
    again = nn.ShortConvolution(D, 4, bias=True)
    again.load_state_dict(ours.state_dict())
    y, state = again(x[:, :5], use_cache=True)
    with torch.no_grad():
        for t in range(5, 9):
            before, kept = state, state.clone()
            step, state = again(x[:, t : t + 1], before, True)
            assert torch.equal(before, kept)
            y = torch.cat([y, step], 1)
    torch.testing.assert_close(y, again(x)[0])


def test_convolution_of_one_token_is_not_made_again() -> None:
    for T, elements in ((1, 0), (2, 2 * 2 * D)):
        made = MixerCall().convolution_in_parts(nn.ShortConvolution(D, 4), rows(2, T), (6, 4, 2))
        assert made[1] == elements


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "sigmoid_glu"])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp_is_its_three_layers(activation: str, bias: bool) -> None:
    mlp, x = nn.GatedMLP(D, 20, activation, bias), rows(2, 5).requires_grad_()
    product = getattr(ops, activation)(mlp.gate_proj(x), mlp.up_proj(x))
    found = []
    for y in (mlp(x), mlp.down_proj(product)):
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])])
    torch.testing.assert_close(*found)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), found[0][0])
    assert {name.partition(".")[0] for name in mlp.state_dict()} == {
        "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


@pytest.mark.parametrize("launches", range(3))
def test_gated_mlp_step_is_the_mlp(launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a consistent model, where each of a step's two launches is there or not."""
    mlp, x, h, made = nn.SwiGLU(D, 20), rows(2, 1), rows(2, 1), []

    def step_products(
        x: Tensor, layers: Any, activation: str = "", residual: Tensor | None = None
    ) -> list[Tensor] | None:
        if len(made) == launches:
            return None
        made.append(layers)
        y = [layer(x) for layer in layers]
        y = [ops.swiglu(*y)] if activation else y
        return y if residual is None else [y[0] + residual]

    monkeypatch.setattr(projections, "step_products", step_products)
    with consistent(), BlockStep(torch.zeros(2, dtype=torch.int64), place_tokens).running():
        found = projections.consistent_mlp(mlp, x, h)
    assert len(made) == launches
    torch.testing.assert_close(found, h + mlp(x))


class Doubled(torch.nn.Module):
    """A wrapper that has the weight of what it wraps, as peft's, and another result."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias

    def forward(self, input: Tensor) -> Tensor:
        return 2 * self.base(input)


def doubled_by_a_hook(layer: torch.nn.Linear) -> torch.nn.Linear:
    layer.register_forward_hook(lambda module, args, y: 2 * y)
    return layer


@pytest.mark.parametrize("double", [Doubled, doubled_by_a_hook])
def test_losses_call_what_somebody_put_around_a_layer(double: Callable[..., Any]) -> None:
    hidden, target = rows(5).requires_grad_(), torch.randint(0, 9, (5,))
    loss = nn.LinearCrossEntropyLoss(D, 9, bias=True)
    want = torch.nn.functional.cross_entropy(2 * loss.linear(hidden), target)
    loss.linear = double(loss.linear)
    torch.testing.assert_close(loss(hidden, target), want)

    student, teacher = torch.nn.Linear(D, 9), torch.nn.Linear(6, 9)
    known, mask = torch.randn(5, 6), torch.tensor([True, False, True, True, False])
    p, q = 2 * teacher(known) / 3, 2 * student(hidden) / 3
    rows_of = torch.nn.functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True
    )
    want = 9 * rows_of.sum(-1)[mask].mean()
    got = nn.LinearKLDivLoss(3.0)(hidden, double(student), known, double(teacher), mask)
    torch.testing.assert_close(got, want)
    got.backward()
    assert student.weight.grad is not None and teacher.weight.grad is None


@pytest.mark.parametrize(
    "change",
    [
        doubled_by_a_hook,
        lambda layer: setattr(layer, "forward", lambda x: 2 * x),
        lambda layer: torch.nn.utils.parametrizations.weight_norm(layer),
        lambda layer: layer.to("meta"),
        lambda layer: layer.register_full_backward_hook(lambda *args: None),
        lambda layer: setattr(layer, "activation", "silu"),
    ],
    ids=["hook", "forward", "parametrization", "meta", "backward hook", "activation"],
)
def test_plain_linear_is_false_of_a_changed_layer(change: Callable[[Any], Any]) -> None:
    layer = nn.Linear(D, 7)
    assert plain_linear(layer)
    change(layer)
    assert not plain_linear(layer)


@pytest.mark.parametrize("name", [x for x in MODULES if [*MODULES[x].make().parameters()]])
def test_module_from_the_meta_device_is_as_constructed(name: str) -> None:
    make = MODULES[name].make
    with torch.device("meta"):
        module = make()
    # memory that holds NaN, as the tests have it
    module.to_empty(device="cpu")
    assert any(p.isnan().all() for p in module.parameters())
    for inner in module.modules():
        if list(inner.parameters(recurse=False)):
            inner.reset_parameters()
    for (name, p), new in zip(module.named_parameters(), make().parameters(), strict=True):
        assert p.isfinite().all(), name
        if new.std(correction=0) == 0:
            assert torch.equal(p, new), name
        else:
            assert 0.3 < p.std() / new.std() < 3, name


def test_norms_of_sums_and_gates_are_the_operators() -> None:
    x, other = rows(5), rows(5)
    norm = nn.RMSNorm(D, 1e-5, zero_centered=True)
    torch.nn.init.normal_(norm.weight)
    want = ops.rms_norm(x, norm.weight, residual=other, prenorm=True, zero_centered=True)
    torch.testing.assert_close(norm(x, other, prenorm=True), want, rtol=0, atol=0)
    assert torch.equal(nn.RMSNorm(D, zero_centered=True)(x), nn.RMSNorm(D)(x))
    gated = nn.GatedRMSNorm(D, activation="sigmoid", group_size=4)
    want = ops.rms_norm_gated(x, other, gated.weight, activation="sigmoid", group_size=4)
    assert torch.equal(gated(x, other), want)
    assert torch.equal(nn.L2Norm()(x), ops.l2_norm(x))
    with pytest.raises(NotImplementedError, match="the last dimension alone"):
        nn.LayerNorm((3, D))


def test_rotary_of_packed_q_and_k() -> None:
    turn = nn.RotaryEmbedding(8, xpos=16.0)
    q, k = torch.randn(1, 9, 2, 10), torch.randn(1, 9, 1, 10)
    offsets = torch.tensor([0, 4, 9])
    packed = turn(q, k, cu_seqlens=offsets)
    alone = [turn(q[:, a:b], k[:, a:b]) for a, b in ((0, 4), (4, 9))]
    for i in range(2):
        torch.testing.assert_close(packed[i], torch.cat([x[i] for x in alone], 1))
    shifted = turn(q, k, positions=torch.arange(9) + 100)
    plain = turn(q, k)
    scores = [torch.einsum("bihd,bjgd->bhij", *pair) for pair in (shifted, plain)]
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-3)


def test_linear_cross_entropy_shares_a_given_weight() -> None:
    table = nn.Embedding(9, D)
    loss = nn.LinearCrossEntropyLoss(D, 9, weight=table.weight, z_loss=0.1, softcap=5.0)
    hidden, target = table(torch.randint(0, 9, (5,))), torch.randint(0, 9, (5,))
    want = ops.linear_cross_entropy(hidden, table.weight, target, z_loss=0.1, softcap=5.0)
    torch.testing.assert_close(loss(hidden, target), want)
    with pytest.raises(TypeError, match="no_such_option"):
        nn.LinearCrossEntropyLoss(D, 9, no_such_option=1)
    teacher, student = torch.nn.Linear(6, 9), torch.nn.Linear(D, 9)
    got = nn.LinearKLDivLoss(2.0)(hidden, student, torch.randn(5, 6), teacher)
    got.backward()
    assert student.weight.grad is not None and teacher.weight.grad is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_module_compiles_fullgraph(name: str) -> None:
    """Also for more tokens, which are no other graph."""
    torch.compiler.reset()
    module, tokens = MODULES[name].make(), int(name != "LinearCrossEntropyLoss")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for times in (1, 2):
        given = [torch.cat([x] * times, tokens) for x in MODULES[name].inputs()]
        with torch._dynamo.config.patch(error_on_recompile=times > 1):
            got = compiled(*given)
        for x, y in zip(flat(got), flat(module(*given)), strict=True):
            torch.testing.assert_close(x, y)
            if x.requires_grad:
                x.square().sum().backward()
