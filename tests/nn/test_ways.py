"""Every module of slipstream.nn and every layer in the ways that trainers and libraries run them:
the outputs and gradients of the untouched module. What is refused is a row, with its reason.
Operators are in tests/ops/test_ways.py, whole models in tests/models/test_ways.py."""

import copy
import inspect
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slipstream import layers, nn
from tests.support import module_changes, small_modules, wants
from tests.support.processes import in_processes
from tests.support.small_modules import LAYERS, SUBJECTS, Later, flat, is_sample, modules, results

pytestmark = [
    wants.collectives,
    pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning"),
]
Call = Callable[..., Any]
# changes a module, or the plain one that it shall equal, and returns how to call it
Way = Callable[[torch.nn.Module, torch.nn.Module], Call]


# ---- the ways


def checkpointed(plain: torch.nn.Module, changed: torch.nn.Module, **options: Any) -> Call:
    return partial(checkpoint, changed, **options)


def compiled(plain: torch.nn.Module, changed: torch.nn.Module, **options: Any) -> Call:
    torch.compiler.reset()
    return torch.compile(changed, fullgraph=True, backend="aot_eager", **options)


def functional(plain: torch.nn.Module, changed: torch.nn.Module) -> Call:
    """With the weights of the plain module, and none of its own."""
    weights = {n: p.detach().clone() for n, p in plain.named_parameters()}
    for name, p in changed.named_parameters():
        w = weights[name].requires_grad_(p.requires_grad)
        if p.requires_grad:
            w.register_post_accumulate_grad_hook(lambda w, p=p: setattr(p, "grad", w.grad))
        torch.nn.init.constant_(p, torch.nan)

    def call(*given: Tensor) -> Any:
        return torch.func.functional_call(changed, weights, given)

    return call


def hooked(plain: torch.nn.Module, changed: torch.nn.Module) -> Call:
    module_changes.hook(changed.modules())
    return changed


def adapted(plain: torch.nn.Module, changed: torch.nn.Module) -> Call:
    """As the plain module with the corrections in its weights."""
    for name, wrapped in module_changes.adapt(changed).items():
        wrapped.requires_grad_(False).base.requires_grad_()
        with torch.no_grad():
            plain.get_submodule(name).weight.copy_(wrapped.merged())  # pyright: ignore
    return changed


def copied_deeply(plain: torch.nn.Module, changed: torch.nn.Module) -> Call:
    return _as(changed, copy.deepcopy(plain))


def pickled(plain: torch.nn.Module, changed: torch.nn.Module) -> Call:
    if isinstance(plain, Later | small_modules.Distillation):
        plain = copy.deepcopy(plain)
    return _as(changed, pickle.loads(pickle.dumps(plain)))


def _as(changed: torch.nn.Module, other: torch.nn.Module) -> Call:
    """`changed` becomes the other, of whose parameters the gradients are read."""
    changed.__class__ = other.__class__
    changed.__dict__.clear()
    changed.__dict__.update(vars(other))
    return changed


def from_meta(plain: torch.nn.Module, changed: torch.nn.Module) -> Call:
    """Made on the meta device, in memory that holds NaN, then loaded; buffers are made anew."""
    assert all(x.isfinite().all() for x in plain.buffers())
    weights = copy.deepcopy(plain.state_dict())
    changed.to("meta").to_empty(device="cpu")
    for module in changed.modules():
        for name, _ in module.named_buffers(recurse=False):
            assert name in module.state_dict() or hasattr(module, "reset_parameters"), name
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    changed.load_state_dict(weights)
    return changed


def offloaded(plain: torch.nn.Module, changed: torch.nn.Module) -> Call:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(changed, execution_device=torch.device("cpu"))
    return changed


def ddp(plain: torch.nn.Module, changed: torch.nn.Module, unused: bool = False) -> Call:
    """unused: of a module with parameters that its outputs do not depend on."""
    if not any(p.requires_grad for p in changed.parameters()):
        return changed  # which DDP refuses
    if unused:
        changed.unused = torch.nn.Linear(2, 2)
    return torch.nn.parallel.DistributedDataParallel(changed, find_unused_parameters=unused)


def fsdp(plain: torch.nn.Module, changed: torch.nn.Module, copies: int = 0) -> Call:
    """Every module that has parameters is a unit; with copies of shards, HSDP."""
    units = [x for x in changed.modules() if any(True for _ in x.parameters()) or x is changed]
    module_changes.shard(reversed(units), copies)
    return changed


def tensor_parallel(plain: torch.nn.Module, changed: torch.nn.Module) -> Call:
    if not isinstance(changed, torch.nn.Linear):
        module_changes.split_columns(changed)
    return changed


def together(*ways: Way) -> Way:
    def apply(plain: torch.nn.Module, changed: torch.nn.Module) -> Call:
        call: Call = changed
        for way in ways:
            call = way(plain, changed)
        return call

    return apply


WAYS: dict[str, Way] = {
    "checkpointed": partial(checkpointed, use_reentrant=False),
    "reentrant": partial(checkpointed, use_reentrant=True),
    "selective": partial(
        checkpointed,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, module_changes.policy),
    ),
    "functional": functional,
    "hooked": hooked,
    "adapted": adapted,
    "copied": copied_deeply,
    "pickled": pickled,
    "from meta": from_meta,
    "ddp": ddp,
    "ddp, unused": partial(ddp, unused=True),
    "fsdp": fsdp,
    "hsdp": partial(fsdp, copies=1),
    "tensor parallel": tensor_parallel,
    "hooked, fsdp": together(hooked, fsdp),
    "fsdp, checkpointed": together(fsdp, partial(checkpointed, use_reentrant=False)),
}
TRACED: dict[str, Way] = {
    "compiled": compiled,
    "compiled, dynamic": partial(compiled, dynamic=True),
}
# those of which a test in `make test` is a sample
COMPILED = {("SwiGLU", "compiled"), ("GatedRMSNorm", "compiled, dynamic")}

# what torch does not do, and why
EXEMPT = {("Embedding", "reentrant"): "a reentrant checkpoint whose inputs have no gradients"}


def check(name: str, way: str) -> None:
    plain, changed, given = modules(name)
    call = (WAYS | TRACED)[way](plain, changed)
    small_modules.assert_same(results(changed, call, given), results(plain, plain, given))


process = module_changes.process
every_subject = pytest.mark.parametrize("name", SUBJECTS)


def test_every_module_is_a_subject() -> None:
    def classes(package: Any) -> set[str]:
        found = {n for n, x in vars(package).items() if inspect.isclass(x)}
        return found - {"Mixer"}  # which has no forward

    assert {n.partition("-")[0] for n in SUBJECTS} == classes(nn) | classes(layers)
    assert SUBJECTS.keys() >= small_modules.SAMPLE


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(("name", "way"), [x for x in product(SUBJECTS, WAYS) if x not in EXEMPT])
@pytest.mark.sample(which=lambda name, way: is_sample(name))
def test_module_in_a_way_is_the_same(name: str, way: str) -> None:
    check(name, way)


@every_subject
@pytest.mark.parametrize("way", TRACED)
@pytest.mark.sample(which=lambda name, way: (name, way) in COMPILED)
def test_module_compiles_with_gradients(name: str, way: str) -> None:
    check(name, way)


@every_subject
@pytest.mark.sample(which=lambda name: name in ("SwiGLU", "LinearCrossEntropyLoss"))
def test_module_exports_with_gradients(name: str) -> None:
    plain, changed, given = modules(name)
    program = torch.export.export(changed, given, strict=True).module()
    with torch.no_grad():
        program.load_state_dict(changed.state_dict(), strict=False)
    small_modules.assert_same(results(program, program, given), results(plain, plain, given))


@every_subject
@pytest.mark.sample(which=is_sample)
@torch.no_grad()
def test_offloaded_module_is_the_same(name: str) -> None:
    plain, changed, given = modules(name)
    call = offloaded(plain, changed)
    assert all(p.is_meta for p in changed.parameters())
    torch.testing.assert_close(flat(call(*given)), flat(plain(*given)))


@every_subject
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.sample(which=lambda name, dtype: is_sample(name))
def test_module_under_autocast_learns_the_same(name: str, dtype: torch.dtype) -> None:
    plain, changed, given = modules(name)

    def call(*inputs: Tensor) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return changed(*inputs)

    (_, got), (_, want) = results(changed, call, given), results(plain, plain, given)
    assert got.keys() == want.keys()
    for n, grad in want.items():
        assert got[n].dtype == torch.float32
        assert float((got[n] - grad).norm()) <= 0.15 * max(float(grad.norm()), 0.5), n


def _dual(plain: torch.nn.Module, given: list[Tensor]) -> None:
    directions = [torch.randn_like(x) for x in given if x.is_floating_point()]
    h, moved = 1e-6, []
    for sign in (1, -1):
        steps = iter(directions)
        moved.append([x + sign * h * next(steps) if x.is_floating_point() else x for x in given])
    with torch.no_grad():
        want = (_sum(plain(*moved[0])) - _sum(plain(*moved[1]))) / (2 * h)
    with forward_ad.dual_level():
        steps = iter(directions)
        duals = [
            forward_ad.make_dual(x, next(steps)) if x.is_floating_point() else x for x in given
        ]
        tangent = forward_ad.unpack_dual(_sum(plain(*duals))).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, want, rtol=1e-4, atol=1e-6)


def _second(plain: torch.nn.Module, given: list[Tensor]) -> None:
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    floating = [x for x in inputs if x.requires_grad]
    directions = [torch.randn_like(x) for x in floating]

    def first(points: list[Tensor], create_graph: bool) -> Tensor:
        grads = torch.autograd.grad(
            _sum(plain(*points)), [x for x in points if x.requires_grad],
            create_graph=create_graph, materialize_grads=True,
        )  # fmt: skip
        return sum(((g * d).sum() for g, d in zip(grads, directions)), torch.zeros(()).double())

    h, values = 1e-5, []
    for sign in (1, -1):
        steps = iter(directions)
        at = [(x + sign * h * next(steps)).detach().requires_grad_() if x.requires_grad else x
              for x in inputs]  # fmt: skip
        values.append(first(at, False))
    want = (values[0] - values[1]) / (2 * h)
    got = torch.autograd.grad(first(inputs, True), floating, materialize_grads=True)
    along = sum((g * d).sum() for g, d in zip(got, directions))
    torch.testing.assert_close(along, want, rtol=1e-4, atol=1e-5)


def _sum(outputs: Any) -> Tensor:
    return sum((x.sin().sum() for x in flat(outputs)), torch.zeros(()).double())


DERIVATIVES = {"dual": _dual, "second": _second}
# why a module may raise NotImplementedError, naming an operator
OPAQUE = "of operators that torch does not look into, whose backward is another"
BY_HAND = "of operators whose backward on a CPU is written by hand: no second derivative"
# torch's own attention on a CPU, which it refuses by this name
IN_TORCH = "forward AD with _scaled_dot_product_flash_attention_for_cpu"
PRODUCT = "of an operator that torch does not look into, whose backward is made of itself"
REFUSES = {OPAQUE: {"dual", "second"}, BY_HAND: {"second"}, PRODUCT: {"dual"}}
REFUSED: dict[str, str] = {
    "Linear": PRODUCT,
    **dict.fromkeys(("Embedding", "LinearCrossEntropyLoss", "LinearKLDivLoss"), OPAQUE),
    **dict.fromkeys(("RMSNorm", "L2Norm", "GatedRMSNorm", "ShortConvolution"), BY_HAND),
    **dict.fromkeys(("GatedMLP", "SwiGLU", "GEGLU", "RotaryEmbedding"), BY_HAND),
    "CrossEntropyLoss": BY_HAND,
    **dict.fromkeys(LAYERS, OPAQUE),
}
del REFUSED["RWKV7ChannelMix"]


@every_subject
@pytest.mark.parametrize("way", DERIVATIVES)
@pytest.mark.sample(which=lambda name, way: is_sample(name))
def test_derivative_of_module_is_right_or_refused(name: str, way: str) -> None:
    plain, _, given = modules(name)
    plain = plain.double()
    wide = [x.double() if x.is_floating_point() else x for x in given]
    reason = REFUSED.get(name)
    permitted = reason is not None and way in REFUSES[reason]
    if not any(x.is_floating_point() for x in wide):
        return  # nothing to go along
    words = r"^slipstream(\.ops\.|\.nn\.|::)\w+: |" + IN_TORCH
    names_it = pytest.raises(NotImplementedError, match=words)
    refusal: AbstractContextManager = names_it if permitted else nullcontext()
    with refusal:
        DERIVATIVES[way](plain, wide)


@every_subject
def test_module_refuses_what_is_no_tensor(name: str) -> None:
    plain, _, given = modules(name)
    inner = getattr(plain, "layer", plain) if isinstance(plain, Later) else plain
    for i in range(len(given)):
        for wrong in (None, 3.5, "x", [1.0]):
            args = [*given]
            args[i] = wrong  # type: ignore[call-overload]
            with pytest.raises(TypeError, match=r"^\w+: want |argument '\w+'"):
                inner(*args)


def _in_process(rank: int, names: list[str], found: Any) -> None:
    for name in names:
        for way in ("ddp", "ddp, unused", "fsdp", "hsdp", "tensor parallel", "fsdp, checkpointed"):
            torch.manual_seed(0)
            try:
                check(name, way)
            except Exception as error:
                found.put(f"{name}, {way}, rank {rank}: {type(error).__name__} {error}"[:2000])


@pytest.mark.slow
def test_modules_in_two_processes_are_the_same(tmp_path: Path) -> None:
    assert in_processes(2, tmp_path, _in_process, [*SUBJECTS]) == []
