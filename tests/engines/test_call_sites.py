"""What the engines' own source passes to slipstream.integrations: every argument of every call."""

import ast
import inspect
from typing import Any

import pytest

from slipstream.integrations import sglang, sglang_functions, vllm
from tests.support.engines import calls, folder, loaded

pytestmark = pytest.mark.slow
VLLM = ["vllm-0.33.0", "vllm-0.26.0"]
SGLANG = ["sglang-0.5.23", "sglang-0.5.16"]


def takes(function: Any, call: ast.Call) -> None:
    """The function takes the call's arguments: TypeError names the one that it does not."""
    keywords = [x.arg for x in call.keywords]
    assert None not in keywords, ast.unparse(call)
    inspect.signature(function).bind(*call.args, **dict.fromkeys(keywords))


@pytest.mark.parametrize("release", VLLM)
def test_vllm_passes_known_arguments(release: str) -> None:
    functions = {
        "selective_state_update": vllm.selective_state_update,
        "chunk_gated_delta_rule": vllm.chunk_gated_delta_rule,
        "fused_sigmoid_gating_delta_rule_update": vllm.delta_rule_update,
    }
    seen = set()
    for path in ("layers/mamba", "models/plamo2.py", "warmup"):
        root = folder(release) / "vllm/model_executor" / path
        for _, call in calls(release, str(root), set(functions)) if root.exists() else []:
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            takes(functions[name], call)
            seen.add(name)
    assert seen == set(functions)


@pytest.mark.parametrize("release", VLLM)
def test_signatures_are_vllms(release: str) -> None:
    """Names, order and defaults, of what is called by position too."""
    files = ["vllm.model_executor.layers.mamba.ops.ssu_dispatch"]
    files += ["vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating"]
    given: dict[str, Any] = {"vllm__v1__attention__backends__utils": {"NULL_BLOCK_ID": 0}}

    def parameters(function: Any) -> list[tuple[str, Any]]:
        found = inspect.signature(function).parameters.values()
        return [(p.name, p.default) for p in found if p.name != "self"]

    with loaded(release, *files, **given) as (dispatch, gating):
        ours, theirs = parameters(vllm.selective_state_update), dispatch.selective_state_update
        assert ours == parameters(theirs) == parameters(dispatch.MambaSSUBackend.__call__)
        theirs = dict(parameters(gating.fused_sigmoid_gating_delta_rule_update))
        ours = dict(parameters(vllm.delta_rule_update))
        needed = {"initial_state", "cu_seqlens", "ssm_state_indices"}  # None there
        assert {k: v for k, v in ours.items() if k not in needed} == {
            k: v for k, v in theirs.items() if k not in needed
        }
        assert list(ours)[:9] == list(theirs)[:9]


# what SGLang passes and slipstream refuses where it asks for something: rings, trees, checkpoints
RINGS = {f"replayssm_{x}" for x in ("d", "k", "g", "write_pos", "force_flush")}
REFUSED = {
    "decode": set(),
    "packed_decode": RINGS,
    "target_verify": {"retrieve_parent_token"},
    "extend": {"state_checkpoint_cu_starts", "state_checkpoint_indices", "num_state_checkpoints"},
}
# of keywords in a dictionary: KDA's verification
IN_A_DICT = {"cache_ring", "replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta"}


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("release", SGLANG)
def test_sglang_passes_known_arguments(release: str, kind: str) -> None:
    kernel = {"gdn": sglang.GDNKernel, "kda": sglang.KDAKernel}[kind]
    at = folder(release) / "sglang/srt/layers/attention/linear"
    files = [at / f"{kind}_backend.py", *at.glob(f"{kind}_prefill_graph.py")]
    seen = set()
    for file in files:
        for where, call in calls(release, str(file), set(REFUSED)):
            assert isinstance(call.func, ast.Attribute)
            if "dispatcher" not in ast.unparse(call.func.value):
                continue
            method, names = call.func.attr, {x.arg for x in call.keywords} - {None}
            assert not call.args, where
            seen.add(method)
            # packed_decode hands the rest on to decode
            takers = [kernel.decode] if method == "packed_decode" else []
            takers.append(getattr(kernel, method))
            ours = {p for f in takers for p in inspect.signature(f).parameters}
            unknown = names - ours - sglang._HINTS
            assert unknown <= REFUSED[method], where
            for name in unknown:
                with pytest.raises(NotImplementedError, match=f"^{name}: "):
                    sglang._refuse({name: True})
    assert seen == set(REFUSED)


@pytest.mark.parametrize("release", SGLANG)
def test_sglangs_functions_have_its_arguments(release: str) -> None:
    """Of the calls of SGLang's layers, and in the order of its own definitions."""
    places = [x for _, _, places in sglang_functions.KINDS.values() for x in places.values()]
    names = {x for functions in places for x in functions}
    seen = set()
    for folder_name in ("mamba", "linear"):
        where = f"sglang/srt/layers/attention/{folder_name}"
        for _, call in calls(release, where, names):
            name = getattr(call.func, "id", "")
            takes(getattr(sglang_functions, name), call)
            seen.add(name)
    assert seen == names
    for file in (folder(release) / "sglang/kernels/ops").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                theirs = [x.arg for x in node.args.args]
                ours = [*inspect.signature(getattr(sglang_functions, node.name)).parameters]
                common = [x for x in theirs if x in ours]
                assert common == [x for x in ours if x in theirs] and common[:6] == theirs[:6]


def test_sglang_hands_on_rings_that_are_refused() -> None:
    source = (folder(SGLANG[0]) / "sglang/srt/layers/attention/linear/kda_backend.py").read_text()
    (made,) = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "ring_kwargs"
        and isinstance(node.value, ast.Call)
    ]
    assert {x.arg for x in made.keywords} == IN_A_DICT
    ours = set(inspect.signature(sglang.KDAKernel.target_verify).parameters) | sglang._HINTS
    assert not IN_A_DICT & ours
