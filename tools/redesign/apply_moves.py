"""Moves modules and rewrites imports. Run in the repository root: python apply_moves.py [--dry]"""
import ast, re, subprocess, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from moves import M, PACKAGES, TESTS, TEST_PACKAGES

ROOT = Path.cwd()
files = subprocess.run(["git", "ls-files"], capture_output=True, text=True).stdout.split()
py = [f for f in files if f.endswith(".py")]
modules = {}  # every module, by its dotted name
for f in py:
    if f.startswith(("slipstream/", "tests/")):
        modules[f[:-3].replace("/", ".").removesuffix(".__init__")] = f
MOVES = {f"slipstream.{k}": f"slipstream.{v}" for k, v in M.items()} | TESTS
PKGS = {f"slipstream.{k}": f"slipstream.{v}" for k, v in PACKAGES.items()} | TEST_PACKAGES
full = {}
for m in modules:
    if m in MOVES:
        full[m] = MOVES[m]
        continue
    for old in sorted(PKGS, key=len, reverse=True):
        if m == old or m.startswith(old + "."):
            full[m] = PKGS[old] + m[len(old):]
            break
print("not there:", sorted(set(MOVES) - set(modules)))
full = {k: v for k, v in full.items() if k != v}
is_pkg = {m: f.endswith("__init__.py") for m, f in modules.items()}
DOT = full

def new_name(dotted):  # longest prefix
    return DOT.get(dotted, dotted)

TESTPKG = {}

conflicts = []
def rewrite(path, text):
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    edits = []      # (start_line, start_col, end_line, end_col, replacement)
    renames = {}    # local name -> new local
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)): bound.add(node.id)
        elif isinstance(node, ast.arg): bound.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)): bound.add(node.name)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("slipstream", "tests") and node.level == 0:
            groups = {}
            for a in node.names:
                child = f"{node.module}.{a.name}"
                local = a.asname or a.name
                if child in DOT:
                    parent, _, name = DOT[child].rpartition(".")
                    if a.asname:
                        new_local = a.asname
                    else:
                        new_local = name
                    groups.setdefault(parent, []).append((name, a.asname if a.asname and a.asname != name else None, local, new_local))
                else:
                    parent = DOT.get(node.module, node.module)
                    groups.setdefault(parent, []).append((a.name, a.asname, local, local))
            indent = lines[node.lineno - 1][:node.col_offset]
            out = []
            for parent, names in groups.items():
                parts = []
                for name, asname, local, new_local in names:
                    child = f"{parent}.{name}"
                    if local != new_local:
                        seen = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
                        last = parent.split(".")
                        choices = [new_local, f"{last[-1]}_{new_local}", f"{last[-2]}_{last[-1]}_{new_local}"]
                        free = [c for c in choices if c not in bound and c not in seen and (c not in imported or imported[c] == child)]
                        if local in bound or not free:
                            conflicts.append((path, local, new_local))
                            parts.append(f"{name} as {local}")
                            imported[local] = child
                            continue
                        if local in renames and imported.get(renames[local]) == child:
                            choice = renames[local]
                        elif local in renames:
                            conflicts.append((path, local, new_local, "two modules under one name"))
                            parts.append(f"{name} as {local}")
                            continue
                        else:
                            choice = free[0]
                        renames[local] = choice
                        imported[choice] = child
                        parts.append(name if choice == name else f"{name} as {choice}")
                        continue
                    imported[new_local] = child
                    parts.append(name if asname is None else f"{name} as {asname}")
                body = ", ".join(parts)
                s = f"from {parent} import {body}"
                if len(indent + s) > 100:
                    s = f"from {parent} import (\n" + "".join(f"{indent}    {p},\n" for p in parts) + f"{indent})"
                out.append(s)
            edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, ("\n" + indent).join(out)))
        elif isinstance(node, ast.Import):
            for a in node.names:
                pass  # handled by the text pass
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in renames:
            edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, renames[node.id]))
    # apply, last first. col offsets are utf8 bytes
    for sl, sc, el, ec, rep in sorted(edits, reverse=True):
        first = lines[sl - 1].encode(); last = lines[el - 1].encode()
        merged = first[:sc].decode() + rep + last[ec:].decode()
        lines[sl - 1:el] = [merged]
    return "".join(lines)

PAT = re.compile("|".join(re.escape(k) + r"(?![\w])" for k in sorted(DOT, key=len, reverse=True)))
def text_pass(text):
    return PAT.sub(lambda m: DOT[m[0]], text)

# path forms in prose: runtime/guarded_launch.py, runtime/launch_cache.py, kernels/linear/workspace.py, linear/workspace.py ...
PATHS = {}
for k, v in full.items():
    if is_pkg[k]: continue
    o, n = k.replace(".", "/") + ".py", v.replace(".", "/") + ".py"
    PATHS[o] = n
    for prefix in ("slipstream/", "slipstream/kernels/", "slipstream/kernels/linear/", "slipstream/kernels/softmax/", "slipstream/kernels/matmul/"):
        short = o.removeprefix(prefix)
        if short != o and "/" in short and not (prefix != "slipstream/" and short.split("/")[0] in ("triton", "eager") ):
            target = n.removeprefix(prefix.replace("softmax", "attention"))
            PATHS.setdefault(short, target.removeprefix("slipstream/"))
for k in list(PATHS):
    if "/" not in k:  # kept.py at the top of kernels
        del PATHS[k]
PPAT = re.compile(r"(?<![\w/.])(" + "|".join(re.escape(k) for k in sorted(PATHS, key=len, reverse=True)) + r")(?![\w])")
def path_pass(text):
    return PPAT.sub(lambda m: PATHS[m[1]], text)

if __name__ == "__main__":
    dry = "--dry" in sys.argv
    for f in py:
        p = ROOT / f
        t = p.read_text()
        n = path_pass(text_pass(rewrite(f, t)))
        if n != t and not dry: p.write_text(n)
    for f in files:
        if f.endswith((".md", ".toml", ".yaml", ".cfg")) or f in ("Makefile",):
            p = ROOT / f; t = p.read_text(); n = path_pass(text_pass(t))
            if n != t and not dry: p.write_text(n)
    print("conflicts:"); [print("  ", c) for c in conflicts]
    if dry: sys.exit()
    new_pkgs = set()
    for k, v in full.items():
        src = modules[k]
        dst = v.replace(".", "/") + ("/__init__.py" if is_pkg[k] else ".py")
        if src == dst: continue
        (ROOT / dst).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / dst).exists(): print("exists", dst); continue
        subprocess.run(["git", "mv", src, dst], check=True)
    # non-py files
    for f in files:
        if f.endswith("MATH.md") or f.endswith("verified.json"):
            d = f[len("slipstream/"):] if f.startswith("slipstream/") else None
            if d is None: continue
            for old, new in (("kernels/softmax", "kernels/attention"), ("kernels/scan", "kernels/gated_scan"), ("core/", "compiler/")):
                if d.startswith(old):
                    dst = "slipstream/" + new + d[len(old):]
                    (ROOT / dst).parent.mkdir(parents=True, exist_ok=True)
                    subprocess.run(["git", "mv", f, dst], check=True)
