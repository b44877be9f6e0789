"""Renames module-level names everywhere: python rename_symbols.py TABLE.txt  (in the repository root)

TABLE lines: `dotted.module old new` (module may lack the prefix "slipstream."). `#` starts a comment.
Handles definitions, from-imports, module attributes, re-exports, mock.patch.object/monkeypatch.setattr(module, "name"),
and strings "package.module.name", "package.module:name". Prose in `backticks` or elsewhere is left alone.
"""
import ast, re, subprocess, sys
from pathlib import Path

files = [f for f in subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True).stdout.split() if f.endswith(".py") and Path(f).exists()]
modname = {f: f[:-3].replace("/", ".").removesuffix(".__init__") for f in files}
modules = {v: k for k, v in modname.items()}
text = {f: Path(f).read_text() for f in files}
trees = {f: ast.parse(t) for f, t in text.items()}

class Scope:
    def __init__(self, node, parent, module): self.node, self.parent, self.module, self.names, self.free = node, parent, module, {}, set()
    def bind(self, name, what):
        if name in self.free: return
        self.names.setdefault(name, []).append(what)
    def lookup(self, name):
        s = self
        first = True
        while s is not None:
            if name in s.names and (first or not isinstance(s.node, ast.ClassDef)): return s
            s, first = s.parent, False
        return None

def analyse(f):
    """All (kind, node, scope) uses of a file, and its scopes."""
    mod = modname[f]
    top = Scope(trees[f], None, mod)
    uses = []
    pending = []
    def visit(node, scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope.bind(node.name, ("def", node))
            uses.append(("def", node, scope))
            for d in node.decorator_list: visit(d, scope)
            inner = Scope(node, scope, mod)
            if isinstance(node, ast.ClassDef):
                for b in [*node.bases, *node.keywords]: visit(b, scope)
            else:
                a = node.args
                for x in [*a.defaults, *[d for d in a.kw_defaults if d]]: visit(x, scope)
                for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, *([a.vararg] if a.vararg else []), *([a.kwarg] if a.kwarg else [])]:
                    inner.bind(x.arg, ("arg", x))
                    if x.annotation: visit(x.annotation, scope)
                if node.returns: visit(node.returns, scope)
            for s in ast.walk(node):
                if isinstance(s, (ast.Global, ast.Nonlocal)): inner.free.update(s.names)
            for s in node.body: visit(s, inner)
            return
        if isinstance(node, ast.Lambda):
            inner = Scope(node, scope, mod)
            for x in [*node.args.defaults, *[d for d in node.args.kw_defaults if d]]: visit(x, scope)
            for x in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *([node.args.vararg] if node.args.vararg else []), *([node.args.kwarg] if node.args.kwarg else [])]: inner.bind(x.arg, ("arg", x))
            visit(node.body, inner); return
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            inner = Scope(node, scope, mod)
            for g in node.generators:
                visit(g.target, inner); visit(g.iter, inner)
                for i in g.ifs: visit(i, inner)
            for e in ([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]): visit(e, inner)
            return
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for a in node.names:
                child = f"{node.module}.{a.name}"
                what = ("module", child) if child in modules else ("symbol", node.module, a.name)
                scope.bind(a.asname or a.name, what)
            uses.append(("from", node, scope)); return
        if isinstance(node, ast.Import):
            for a in node.names: scope.bind((a.asname or a.name).split(".")[0], ("import", a.name, a.asname))
            return
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, (ast.Store, ast.Del)):
                scope.bind(node.id, ("store", node))
            uses.append(("name", node, scope)); return
        if isinstance(node, ast.ExceptHandler) and node.name: scope.bind(node.name, ("store", node))
        if isinstance(node, ast.Attribute): uses.append(("attr", node, scope))
        if isinstance(node, ast.Call): uses.append(("call", node, scope))
        for c in ast.iter_child_nodes(node): visit(c, scope)
    for s in trees[f].body: visit(s, top)
    return top, uses

info = {f: analyse(f) for f in files}

def origin(module, name, seen=()):
    """The module that defines `name` as seen in `module`."""
    f = modules.get(module)
    if f is None or (module, name) in seen: return module, name
    b = info[f][0].names.get(name)
    if b and all(x[0] == "symbol" for x in b):
        _, m, n = b[0]
        return origin(m, n, (*seen, (module, name)))
    return module, name

def resolve(name, scope):
    """("module", dotted) | ("symbol", module, name) | None for local things."""
    s = scope.lookup(name)
    if s is None: return None
    b = s.names[name]
    kinds = {x[0] for x in b}
    if kinds == {"module"} and len({x[1] for x in b}) == 1: return b[0]
    if kinds == {"symbol"} and len({x[1:] for x in b}) == 1: return ("symbol", *origin(b[0][1], b[0][2]))
    if kinds == {"import"} : return None
    if s.parent is None: return ("symbol", s.module, name)
    return None

def full_module(node, scope):
    """dotted module of an expression like launch or slipstream.kernels.x, or None"""
    if isinstance(node, ast.Name):
        r = resolve(node.id, scope)
        if r and r[0] == "module": return r[1]
        s = scope.lookup(node.id)
        if s and any(x[0] == "import" for x in s.names[node.id]):
            x = s.names[node.id][0]
            return x[1] if x[2] else node.id
        return None
    if isinstance(node, ast.Attribute):
        base = full_module(node.value, scope)
        if base is None: return None
        d = f"{base}.{node.attr}"
        return d if d in modules or any(m.startswith(d + ".") for m in modules) else None
    return None

table = {}
for line in Path(sys.argv[1]).read_text().splitlines():
    line = line.partition("#")[0].split()
    if not line: continue
    m, old, new = line
    if m not in modules: m = f"slipstream.{m}"
    if m not in modules: print("no module", line); continue
    if old not in info[modules[m]][0].names: print("no name", m, old); continue
    if origin(m, old) != (m, old): print("defined elsewhere:", m, old, origin(m, old)); continue
    if new in info[modules[m]][0].names: print("taken:", m, new); continue
    table[m, old] = new

problems = []
for f in files:
    top, uses = info[f]
    edits = []
    lines = text[f].splitlines(keepends=True)
    aliased = set()
    # imports first: which local names change
    for kind, node, scope in uses:
        if kind == "from":
            parts = []
            hit = False
            for a in node.names:
                child = f"{node.module}.{a.name}"
                if child not in modules:
                    o = origin(node.module, a.name)
                    if o in table:
                        hit = True
                        new = table[o]
                        explicit = a.asname == a.name  # re-export
                        if a.asname and not explicit:
                            parts.append(f"{new} as {a.asname}"); continue
                        other = scope.lookup(new)
                        names_used = any(k == "name" and n.id == new and s.lookup(new) is not None and s.lookup(new) is not scope and s.lookup(new).parent is not None for k, n, s in uses)
                        if (other is not None and not all(x[0] == "symbol" and origin(x[1], x[2]) == o for x in other.names[new])) or names_used:
                            problems.append(f"{f}: {new} is taken, kept as {a.name}")
                            aliased.add((id(scope), a.name))
                            parts.append(f"{new} as {a.name}"); continue
                        parts.append(f"{new} as {new}" if explicit else new); continue
                parts.append(a.name if a.asname is None else f"{a.name} as {a.asname}")
            if hit:
                indent = lines[node.lineno - 1][:node.col_offset]
                s = f"from {node.module} import {', '.join(parts)}"
                if len(indent + s) > 100: s = f"from {node.module} import (\n" + "".join(f"{indent}    {p},\n" for p in parts) + f"{indent})"
                edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, s))
    for kind, node, scope in uses:
        if kind == "name":
            r = resolve(node.id, scope)
            if r and r[0] == "symbol":
                s = scope.lookup(node.id)
                if (id(s), node.id) in aliased: continue
                b = s.names[node.id]
                if b[0][0] == "symbol":
                    # an `as` alias keeps its name
                    if b[0][2] != node.id: continue
                key = (r[1], r[2])
                if key in table:
                    new = table[key]
                    inner = scope.lookup(new)
                    if inner is not None and inner is not s and inner.parent is not None:
                        problems.append(f"{f}:{node.lineno}: {node.id} -> {new} is hidden by a local name")
                    edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, new))
        elif kind == "def" and scope.parent is None and (modname[f], node.name) in table:
            line = lines[node.lineno - 1].encode()
            at = line.index(node.name.encode(), node.col_offset + 4)
            edits.append((node.lineno, at, node.lineno, at + len(node.name.encode()), table[modname[f], node.name]))
        elif kind == "attr":
            m = full_module(node.value, scope)
            if m:
                o = origin(m, node.attr)
                if o in table:
                    edits.append((node.end_lineno, node.end_col_offset - len(node.attr.encode()), node.end_lineno, node.end_col_offset, table[o]))
        elif kind == "call":
            if len(node.args) >= 2 and isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str):
                m = full_module(node.args[0], scope)
                if m:
                    o = origin(m, node.args[1].value)
                    if o in table:
                        c = node.args[1]
                        edits.append((c.lineno, c.col_offset, c.end_lineno, c.end_col_offset, f'"{table[o]}"'))
    for sl, sc, el, ec, rep in sorted(set(edits), reverse=True):
        first, last = lines[sl - 1].encode(), lines[el - 1].encode()
        lines[sl - 1:el] = [first[:sc].decode() + rep + last[ec:].decode()]
    out = "".join(lines)
    for (m, old), new in table.items():
        short = m.removeprefix("slipstream.kernels.")
        if old in out:
            out = re.sub(rf"(\b{re.escape(m)}|[\"'}}.]{re.escape(short)})([.:]){re.escape(old)}\b", rf"\1\2{new}", out)
    if out != text[f]: Path(f).write_text(out)
print(*problems, sep="\n")
print(len(table), "names")
