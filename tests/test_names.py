"""Names of modules, functions, classes and constants are those of GLOSSARY.md."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import slipstream

# what things were called before they had the field's names
BANNED = {
    "walk", "walks", "walked", "kept", "told", "meet", "met", "noted", "anew", "owed", "hopper",
    "additive", "portable", "marks", "notes", "turns",
}  # fmt: skip
# the same of parameters, local variables and fields
BANNED_LOCALS = BANNED | {
    "again", "ends", "few", "found", "given", "heard", "held", "here", "instead", "least", "made",
    "mark", "most", "own", "part", "parts", "room", "sight", "slot", "slots", "span", "spans",
    "spot", "there", "turn", "turned", "wanted",
}  # fmt: skip
# whole names that others replaced: Selection.impls, CompilerState.accepted and so on
RETIRED = {
    "admitted", "demote", "quiet", "refuses", "stream_of", "tiles_of", "tries",
    "wants_probe", "watched", "Starts",
    "BESIDE", "EXACT", "FEW", "FINE", "KEEP", "LEAST", "LITTLE", "LONG", "MAKE", "MOST", "SKIP",
}  # fmt: skip
# of kernels/linear, whose temporaries are not all done
BANNED_LINEAR = BANNED | {"left", "mark", "own", "part", "parts", "slot", "slots", "turn"}
# GLOSSARY.md: a cache slot is one sequence's state in a pool
ALLOWED = {"cache_slot", "cache_slots"}
# folders of slipstream whose locals are done; runtime is not among them yet
FOLDERS = (
    "compiler",
    *(f"kernels/{x}" for x in ("attention", "conv", "elementwise", "gated_scan", "loss", "matmul")),
    *(f"kernels/{x}" for x in ("mixer_step", "norm", "primitives", "projection_step")),
    *(f"kernels/{x}" for x in ("running_mean", "selective_scan")),
)
# flags that are set unless a call says otherwise, and those that one place sets otherwise
SET = """
accepts_loss_kwargs accumulate_grad_in_fp32 affine allow_is_causal_skip backward biased can_pass
can_torch_compile checks depends_on_layer detach elementwise_affine enabled for_backward
fuse_swiglu gate_gradient gluon gradients has_lines in_place inplace_final_state interpreted
is_compileable lasting leaves_states materializes norm norm_before_gate normalize on persistent
pos_idx_in_fp32 pred rotary_interleaved scales_states sums supports_gradient_checkpointing
supports_packed_decode supports_packed_decode_safe_gate supports_safe_gate
supports_safe_gate_verify supports_strided_target_verify_qkv supports_track_state_snapshot
tested tie_word_embeddings traced use_beta use_gate use_tf32x3_affine_chain verifies_drafts
wide_in_chunks"""
OTHERWISE = """
_detach DirectCall, allow_neg_eigval GatedDeltaProduct, bias LayerNorm, bias Linear, bias _lora,
causal attention, causal index, causal index_loss, conv_bias Mamba2, convolved Gated,
delta_softplus _mamba_inner, grouped Sample,
inplace channel_mixing_rwkv7, interleaved MLA, is_rms_norm FusedRMSNormGated,
is_rms_norm FusedRMSNormGatedLinear, is_rms_norm RMSNorm, is_rms_norm RMSNormGated,
is_rms_norm RMSNormLinear, late Line, leaves_states Mixer, mix HyperConnection,
norm_affine GatedLinearAttention, norm_before_gate Mamba2, norm_before_gate RMSNormGated,
normalize fused_recurrent_linear_attn, output_final_state fused_recurrent_rwkv7,
remembers CompilerState, replay DirectCall, reuses_w Sm90Delta, saves Sm90Delta,
scales_states ChunkBackend, takes_first_value RWKV7, use_beta_sigmoid_in_kernel step,
use_cache SlipstreamConfig, use_cache recurrent_gemma, use_gate DeltaNet,
use_qk_l2norm_in_kernel chunk_gated_delta_rule, use_qk_l2norm_in_kernel step,
verifies_drafts Mixer"""
ROOT = Path(slipstream.__file__).parent
TOP = ROOT.parent


def _defined(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [path.stem, *(node.name for node in ast.walk(tree) if isinstance(node, kinds))]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names += [x.id for x in targets if isinstance(x, ast.Name)]
    return names


def _bound(path: Path) -> set[str]:
    """Parameters, names that are assigned to, and fields of a module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _words(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))


def test_names_have_no_banned_words() -> None:
    """Neither definitions nor parameters, variables and fields; of tests and the like constants."""
    paths = sorted(p for p in ROOT.rglob("*.py"))
    assert len(paths) > 300
    found = []
    for path in paths:
        folder = path.relative_to(ROOT).as_posix()
        of_file = {*_defined(path), *(bound := _bound(path))} - ALLOWED
        if not folder.startswith("compat/"):  # it has the names of other packages
            found += [(folder, x) for x in of_file if x in RETIRED or _words(x) & BANNED]
        locals_of = {"kernels/linear/": BANNED_LINEAR} | dict.fromkeys(FOLDERS, BANNED_LOCALS)
        banned = next((y for x, y in locals_of.items() if folder.startswith(x)), set())
        found += [(folder, x) for x in bound - ALLOWED if _words(x) & banned]
    constants = re.compile(rf"^({'|'.join(x for x in RETIRED if x.isupper())})\b.*=", re.M)
    others = [p for x in ("tests", "bench", "tools", "examples") for p in (TOP / x).rglob("*.py")]
    assert len(others) > 300
    found += [(p.name, x) for p in others for x in constants.findall(p.read_text())]
    assert sorted(found) == []


IMPORT = re.compile(r"^ *(?:from (\S+) )?import ([^\n(]+|\([^)]*\))", re.MULTILINE)


def test_test_modules_import_no_other() -> None:
    """Shared code is in tests/support, or in a module beside them without test_ in front."""
    tests = TOP / "tests"
    paths = sorted(tests.rglob("*.py"))
    assert len(paths) > 150
    found = [(path.name, x) for path in paths for x in IMPORT.findall(path.read_text())]
    assert len(found) > 3000
    assert [x for x in found if re.search(r"(^|\W)test_", " ".join(x[1]))] == []


def test_test_names_are_short() -> None:
    """test_<function>_<property>: no sentence."""
    paths = sorted(Path(__file__).parent.rglob("test_*.py"))
    names = {x for p in paths for x in re.findall(r"^ *def (test_\w+)", p.read_text(), re.M)}
    assert len(names) > 900
    articles = ("test_a_", "test_an_", "test_the_", "test_what_")
    assert [x for x in sorted(names) if x.startswith(articles) or x.count("_") > 9] == []


def _launches(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of cached(kernel)[grid], at once or by a local name."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.AnnAssign) and _is_launch(node.value):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                names.add(ast.unparse(target))
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and (
                _is_launch(node.func) or ast.unparse(node.func) in names
            ):
                yield node


def _is_launch(node: ast.AST | None) -> bool:
    launch = isinstance(node, ast.Subscript) and ast.unparse(node.value)
    return bool(launch and launch.removeprefix("launch_cache.").startswith("cached("))


def test_launches_go_through_the_cache() -> None:
    """Which says of each that products are fused, and at which level registers are allocated."""
    found = [
        f"{path}:{node.lineno}"
        for path in sorted(ROOT.rglob("*.py"))
        if "kernel[" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("kernel")
    ]
    assert {x.rpartition("/")[2].partition(":")[0] for x in found} == {"launch_cache.py"}, found


def test_launches_name_their_arguments() -> None:
    """Kernels take up to 56: by place one of them is soon another."""
    sources = {p.relative_to(ROOT): p.read_text() for p in sorted(ROOT.rglob("*.py"))}
    launches = [
        (path, call)
        for path, source in sources.items()
        if "cached(" in source
        for call in _launches(ast.parse(source))
    ]
    assert len(launches) > 80
    by_place = [
        f"{path}:{call.lineno}"
        for path, call in launches
        if len(call.args) > 6 or any(isinstance(x, ast.Starred) for x in call.args)
    ]
    assert by_place == []


def _documented(node: ast.AST) -> list[str]:
    """The names that the section "Args:" of a docstring explains."""
    section = ("\n" + (ast.get_docstring(node) or "")).partition("\nArgs:\n")[2]  # type: ignore[arg-type]
    lines = section.partition("\n\n")[0].split("\n")
    found = [re.match(r"    ([A-Za-z_]\w*(?:, \w+)*): ", line) for line in lines]
    return [name for x in found if x for name in x[1].split(", ")]


def test_docstrings_explain_parameters_that_there_are() -> None:
    wrong, count = [], 0
    for path in (x for x in sorted(ROOT.rglob("*.py")) if "Args:" in x.read_text()):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names = {x.arg for x in ast.walk(node.args) if isinstance(x, ast.arg)}
                documented = _documented(node)
                count += len(documented)
                wrong += [(path.name, node.name, x) for x in documented if x not in names]
    assert wrong == []
    assert count > 500


def test_prose_names_constants_that_there_are() -> None:
    """BLOCK_M in a comment or docstring is a name, or a word of a string, of some module."""
    known: set[str] = set()
    named: list[tuple[str, str]] = []
    for path in sorted(ROOT.rglob("*.py")):
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        for token in tokens:
            words = re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z][A-Z0-9_]*\b", token.string)
            prose = token.type == tokenize.COMMENT or token.string.startswith('"""')
            if prose:
                named += [(str(path.relative_to(ROOT)), x) for x in words]
            else:
                known.update(words)
    assert len(named) > 100
    assert [x for x in named if x[1] not in known] == []


def _defaults(node: ast.AST, place: str) -> Iterator[tuple[str, ast.expr | None, str]]:
    """Parameters and fields below a node: name, default, and the function or class it is of."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        inside = f"{place}.{child.name}" if named else place
        yield from _defaults(child, inside)
        if isinstance(child, ast.arguments):
            x = child.posonlyargs + child.args
            of = [
                *zip(reversed(x), reversed(child.defaults)),
                *zip(child.kwonlyargs, child.kw_defaults),
            ]
            yield from ((x.arg, default, place) for x, default in of)
        elif isinstance(child, ast.AnnAssign | ast.Assign) and isinstance(node, ast.ClassDef):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((ast.unparse(x), child.value, place) for x in targets)


def test_flags_of_one_name_have_one_default() -> None:
    """What a call leaves out means the same wherever it goes on to."""
    found = [
        (name, default.value, f"{name} {place[1:].removesuffix('.__init__')}")
        for path in sorted(ROOT.rglob("*.py"))
        for name, default, place in _defaults(ast.parse(path.read_text()), "")
        if isinstance(default, ast.Constant) and isinstance(default.value, bool)
    ]
    usual = {*SET.split()}
    assert len(found) > 600 and {x for x, *_ in found} > usual
    assert {place for name, x, place in found if x != (name in usual)} == {
        *OTHERWISE.strip().replace(",\n", ", ").split(", ")
    }
