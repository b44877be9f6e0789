"""What apply_moves.py leaves: package docstrings, names in strings."""
import re, subprocess
from pathlib import Path
DOC = {
    "runtime": "What happens between a public function and a kernel: choice, registration, guards, caches, launches.",
    "compiler": "What Slipstream knows of architectures and compilers, and the tools that compile without a GPU.",
    "common": "Checks of arguments, packed sequences and autocast, shared by all families.",
    "tools": "What the commands do: matrix, doctor, precompile, explain. Nothing here runs in a model.",
    "kernels/primitives": "Device code and constants that several families of kernels share.",
    "kernels/linear/sm90/common": "Device code that all sm_90 kernels of the linear family share.",
    "kernels/linear/sm90/delta": "The delta rule on sm_90.",
    "kernels/linear/sm90/dplr": "Decay per channel with an erase (KDA, DPLR, RWKV-7) on sm_90.",
    "kernels/linear/sm90/scalar_decay": "Linear attention with no decay or one decay per token and head on sm_90.",
    "kernels/linear/sm90/vector_decay": "Linear attention with a decay per channel (GLA, RWKV-6, GSA) on sm_90.",
    "kernels/linear/triton/common": "What the Triton kernels of the linear family share.",
    "kernels/linear/triton/delta": "The delta rule in Triton.",
    "kernels/linear/triton/dplr": "Decay per channel with an erase (KDA, DPLR, RWKV-7) in Triton.",
    "kernels/linear/triton/scalar_decay": "Linear attention with no decay or one decay per token and head in Triton.",
    "kernels/linear/triton/vector_decay": "Linear attention with a decay per channel (GLA, RWKV-6, GSA) in Triton.",
}
for k, v in DOC.items():
    p = Path("slipstream") / k / "__init__.py"
    if not p.exists():
        p.write_text(f'"""{v}"""\n')
for p in (Path("slipstream/core"),):
    if p.exists(): subprocess.run(["rm", "-rf", str(p)])
subprocess.run("find slipstream -type d -name __pycache__ -prune -exec rm -rf {} + ; find slipstream -type d -empty -delete", shell=True)
for k in ("tests/support", "tests/runtime", "tests/compiler", "tests/common", "tests/gluon_emulator"):
    p = Path(k) / "__init__.py"
    if Path(k).exists() and not p.exists(): p.write_text("")
subprocess.run("find tests -type d -name __pycache__ -prune -exec rm -rf {} + ; find tests -type d -empty -delete", shell=True)

def sub(path, *pairs):
    p = Path(path); t = p.read_text()
    for old, new in pairs:
        if old not in t: print("not found in", path, ":", old[:60])
        t = t.replace(old, new)
    p.write_text(t)

sub("slipstream/tools/support_page.py", ('"slipstream/core/verified.json"', '"slipstream/compiler/verified.json"'), ("core/verified.json", "compiler/verified.json"))
sub("slipstream/compiler/support_matrix.py", ('".hopper." not in', '".sm90." not in'))

sub("slipstream/compiler/compiler_state.py",
    ("""    root = Path(__file__).parents[1] / "kernels"
    shared = [x for x in root.glob("*.py") if x.stem not in _AGAIN]
    found = {CORE: [Path(__file__).with_name("ids_triton.py"), *shared]}
    for folder in root.iterdir():
        if (folder / "__init__.py").exists():
            paths = [x for x in folder.rglob("*.py") if not _plain(x, folder)]
            paths = [x for x in paths if gluon or x.relative_to(folder).parts[0] != "sm90"]
            found[folder.name] = [*paths, *shared]
""", """    root = Path(__file__).parents[1]
    shared = [root / "runtime/backends.py", *(root / "kernels" / PRIMITIVES).glob("*.py")]
    found = {CORE: [root / "runtime/token_ids_kernel.py", *shared]}
    for folder in (root / "kernels").iterdir():
        if (folder / "__init__.py").exists() and folder.name != PRIMITIVES:
            paths = [x for x in folder.rglob("*.py") if not _plain(x, folder)]
            paths = [x for x in paths if gluon or x.relative_to(folder).parts[0] != "sm90"]
            found[folder.name] = [*paths, *shared]
"""),
    ('''# Modules of kernels/ that only launch again what is compiled.
_AGAIN = ("again", "kept")
''', '''# The folder of kernels/ with what several families share.
PRIMITIVES = "primitives"
'''),
    ("those of the folders hopper, are", "those of the folders sm90, are"),
    ('startswith(("eager", "reference", "plain"))', 'startswith(("eager", "reference", "fallback"))'))
sub("tests/gpu/test_segments.py", ("""
    return run(backend, terms, do, dfinal)""", """    from slipstream.kernels.linear.triton.dplr import backend

    return run(backend, terms, do, dfinal)"""))
WORDS = [
    (r"\"hopper\"", '"sm90"'), (r"\bhopper\|", "sm90|"), (r"'sm90'", "'sm90'"), (r"\b(linear|matmul)\.hopper\b", r"\1.sm90"),
    (r"\bsoftmax\.hopper\b", "attention.sm90"), (r"\bsoftmax\.(triton|decode|latent|append)\b", r"attention.\1"), (r'softmax\.\{', 'attention.{'),
    (r'"scan\.triton', '"gated_scan.triton'), (r"_SM90\b", "_SM90"), (r"\bnot_hopper\b", "sm90_unsupported"), (r"\b_?sm90_refuses\b", "sm90_refuses"),
    (r"\bhopper_launch\b", "sm90_backend"),
]
for f in subprocess.run(["git", "ls-files", "-c", "-o", "--exclude-standard"], capture_output=True, text=True).stdout.split():
    if not Path(f).exists() or not (f.endswith(".py") or (f.endswith(".md") and f not in ("docs/log.md", "docs/SUPPORT.md"))): continue
    t = n = Path(f).read_text()
    for a, b in WORDS:
        n = re.sub(a, b, n)
    if n != t: Path(f).write_text(n)
# prose longer than a line: the rest of a comment or docstring line goes to the next one
def rewrap(path):
    lines = Path(path).read_text().split("\n")
    out = subprocess.run([".venv/bin/ruff", "check", "--select", "E501", "--output-format", "concise", path], capture_output=True, text=True).stdout
    changed = False
    for number in sorted({int(x.split(":")[1]) for x in out.splitlines() if x.startswith(path)}, reverse=True):
        i = number - 1
        while len(lines[i]) > 100:
            line = lines[i]
            indent = line[: len(line) - len(line.lstrip())]
            comment = line.lstrip().startswith("#")
            lead = indent + ("# " if comment else "")
            if not comment and not prose(lines, i): break
            cut = line.rfind(" ", 0, 101)
            if cut <= len(lead): break
            rest, lines[i] = line[cut + 1:], line[:cut]
            changed = True
            nxt = lines[i + 1] if i + 1 < len(lines) else ""
            same = nxt.strip() and nxt.startswith(lead) and nxt[len(lead):len(lead)+1] not in ("", " ", '"') and (comment or prose(lines, i + 1)) and not nxt.strip().startswith(('"""', "Args", "Returns", "Raises"))
            if same: lines[i + 1] = lead + rest + " " + nxt[len(lead):]
            else: lines.insert(i + 1, lead + rest)
            i += 1
    if changed: Path(path).write_text("\n".join(lines))

def prose(lines, i):
    """Whether line i lies in a docstring."""
    import ast
    try: tree = ast.parse("\n".join(lines))
    except SyntaxError: return False
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and node.body and isinstance(node.body[0], ast.Expr) and isinstance(getattr(node.body[0], "value", None), ast.Constant) and isinstance(node.body[0].value.value, str):
            d = node.body[0]
            if d.lineno <= i + 1 <= d.end_lineno: return True
    return False
subprocess.run([".venv/bin/ruff", "check", "--fix", "-q", "."]); subprocess.run([".venv/bin/ruff", "format", "-q", "."])
out = subprocess.run([".venv/bin/ruff", "check", "--select", "E501", "--output-format", "concise", "."], capture_output=True, text=True).stdout
for f in sorted({x.split(":")[0] for x in out.splitlines() if ".py:" in x}): rewrap(f)
subprocess.run([".venv/bin/ruff", "format", "-q", "."])
sub("slipstream/tools/doctor_checks.py", ('''    code = f"from slipstream.tools.doctor_checks import compile_all; compile_all({names}, {full}, {arch!r})"
''', '''    code = "from slipstream.tools.doctor_checks import compile_all; "
    code += f"compile_all({names}, {full}, {arch!r})"
'''))
