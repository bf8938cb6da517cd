"""The shape of the source tree: its imports, checked by docs/packages.toml, and its sizes.

python -m docs.shape            print sizes, import edges and cycles (`make shape`)
python -m docs.shape --write    update the table of packages in docs/architecture.md
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
import tomllib
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pipar"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
RULES = tomllib.loads((ROOT / "docs" / "packages.toml").read_text("utf-8"))
_TYPE_CHECKING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
#: Calls that import a module without an import statement.
_HIDDEN = ("import_module", "__import__")
#: The vocabulary: modules that everything may import.
ROOT_PACKAGE = "(root)"
_TABLE = re.compile(r"(<!-- packages -->\n).*?(<!-- /packages -->)", re.DOTALL)


@dataclass(frozen=True)
class Import:
    """A module that is imported, or a name in one; whether the import runs, and whether that is late: in a function."""

    target: str
    runs: bool
    late: bool


def modules() -> dict[str, str]:
    """Return the source of every module by its name below pipar; `planner.__init__` is a package's own."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): path.read_text("utf-8")
        for path in sorted(SOURCE.rglob("*.py"))
    }


def package_of(module: str) -> str:
    """Return the package of a module below pipar."""
    return module.partition(".")[0] if "." in module else ROOT_PACKAGE


@cache
def imports(source: str) -> tuple[Import, ...]:
    """Return every import of a source, also inside functions; `from a import b` counts as a.b."""
    # Import statements are not inside expressions, which are most of a tree; hidden imports are.
    kinds = (ast.AST,) if any(name in source for name in _HIDDEN) else _STATEMENTS
    return tuple(_imports(ast.parse(source), kinds))


def _imports(tree: ast.Module, kinds: tuple[type[ast.AST], ...]) -> Iterator[Import]:
    waiting: deque[tuple[ast.AST, bool, bool]] = deque([(tree, True, False)])
    while waiting:
        node, runs, late = waiting.popleft()
        yield from (Import(target, runs, late) for target in _targets(node))
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) in _TYPE_CHECKING
        body = {id(inner) for inner in node.body} if is_function or is_for_types else set()  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            if isinstance(child, kinds):
                inside = id(child) in body
                waiting.append((child, runs and not (inside and is_for_types), late or (inside and is_function)))


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "a relative import hides where it points"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Attribute | ast.Name) and _last_name(node) in _HIDDEN:
        return ["import_module"]
    return []


def _last_name(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id


def imported_modules(module: str, source: str, known: Collection[str]) -> list[str]:
    """Return the modules of pipar that a source imports."""
    return _resolved(module, imports(source), known)


def _resolved(module: str, found: Iterable[Import], known: Collection[str]) -> list[str]:
    own = [_module_of(one.target, known) for one in found if one.target.partition(".")[0] == "pipar"]
    return list(dict.fromkeys(target for target in own if target != module))


def _module_of(target: str, known: Collection[str]) -> str:
    """Return the module that has an imported name: the longest part of it that is one."""
    inner = target.removeprefix("pipar").lstrip(".")
    while inner and inner not in known and f"{inner}.__init__" not in known:
        inner = inner.rpartition(".")[0]
    return inner if inner in known else f"{inner}.__init__".lstrip(".")


def without_torch(known: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the modules that torch may not come with, each with the imports by which it comes: empty if it does not.

    Imports inside functions do not count: they run when the function is called.
    """
    when_imported = {
        module: [one for one in imports(source) if one.runs and not one.late] for module, source in known.items()
    }
    edges = {module: _resolved(module, found, known) for module, found in when_imported.items()}
    with_torch = {
        module
        for module, found in when_imported.items()
        if any(one.target.partition(".")[0] == "torch" for one in found)
    }
    return {module: _path(edges, module, with_torch) for module in known if _does_without_torch(module)}


def _does_without_torch(module: str) -> bool:
    is_free = package_of(module) not in RULES["libraries"]["torch"]
    return is_free or module in RULES["without_torch"]["modules"]


def _path(edges: Mapping[str, Sequence[str]], start: str, ends: Collection[str]) -> list[str]:
    """Return a way by imports from one module to any of some others; empty if there is none."""
    paths = {start: [start]}
    for module in (queue := [start]):
        if module in ends:
            return paths[module]
        for target in edges[module]:
            if target not in paths:
                paths[target] = [*paths[module], target]
                queue.append(target)
    return []


def breaches(module: str, source: str, known: Collection[str]) -> list[str]:
    """Return the module's violations of the rules, one sentence each."""
    package, rules = package_of(module), RULES["packages"]
    found = []
    if package != ROOT_PACKAGE and package not in rules:
        return [f"{module} is in a package that docs/packages.toml does not name"]
    if {"utils", "common", "helpers", "manager"} & set(module.split(".")):
        found.append(f"{module} has a name that says nothing")
    for one in imports(source):
        library = one.target.partition(".")[0]
        allowed = RULES["libraries"].get(library)
        is_torch_free = library == "torch" and module in RULES["without_torch"]["modules"]
        if one.runs and allowed is not None and (package not in allowed or is_torch_free):
            found.append(f"{module} imports {library}")
    for target in imported_modules(module, source, known):
        other = package_of(target)
        is_entry = module in ("__init__", "__main__")  # what a user imports and starts
        if (other in (package, ROOT_PACKAGE) and target != "__init__") or is_entry:
            continue
        if package == ROOT_PACKAGE or other not in rules[package]["imports"]:
            found.append(f"{module} imports {target}, which {package} may not")
    return found


def graph(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the modules that each module imports."""
    return {module: imported_modules(module, source, sources) for module, source in sources.items()}


def cycles(edges: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle, by Kosaraju's algorithm."""
    order: list[str] = []
    _visit_all(edges, edges, order)
    backwards: dict[str, list[str]] = {module: [] for module in edges}
    for module, targets in edges.items():
        for target in targets:
            backwards[target].append(module)
    groups = _visit_all(backwards, reversed(order), [])
    return [sorted(group) for group in groups if len(group) > 1]


def _visit_all(
    edges: Mapping[str, Sequence[str]], starts: Collection[str] | Iterator[str], order: list[str]
) -> list[list[str]]:
    """Visit every module depth first; return those reached from each start, and append all to `order` when left."""
    seen: set[str] = set()
    groups = []
    for start in starts:
        group: list[str] = []
        stack = [(start, iter(edges[start]))] if start not in seen else []
        seen.add(start)
        while stack:
            module, targets = stack[-1]
            following = next((target for target in targets if target not in seen), None)
            if following is None:
                order.append(module)
                group.append(module)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(edges[following])))
        groups.append(group)
    return groups


# --- what is printed, and the table


def table() -> str:
    """Return the table of packages for docs/architecture.md."""
    names = list(RULES["packages"])
    rows = [
        f"| `{name}` | {rule['owns']} | {_listed(rule['imports'], names[:place])} |"
        for place, (name, rule) in enumerate(RULES["packages"].items())
    ]
    head = ["| package | owns | may import, in addition to the root |", "|---|---|---|"]
    root = f"| (root) | vocabulary: {', '.join(f'`{name}`' for name in root_modules())} | - |"
    return "\n".join([*head, root, *rows]) + "\n"


def _listed(names: Sequence[str], above: Sequence[str]) -> str:
    if len(above) > 1 and set(names) == set(above):
        return "everything above"
    return " ".join(f"`{name}`" for name in names) or "-"


def root_modules() -> list[str]:
    return [module for module in modules() if "." not in module and not module.startswith("__")]


def with_table(text: str) -> str:
    """Return the architecture page with the table of the current rules."""
    return _TABLE.sub(lambda match: match[1] + table() + match[2], text)


def report() -> Iterator[str]:
    """Yield the lines of `make shape`."""
    sources = modules()
    edges = graph(sources)
    lines = sorted(((text.count("\n"), module) for module, text in sources.items()), reverse=True)
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in _functions(sources.values()))
    widths = sorted(((count, name) for name, count in _constructors(sources)), reverse=True)
    yield f"modules at the root      {len(root_modules())} of {len(sources)}"
    yield f"lines a module           median {statistics.median(count for count, _ in lines):g}, longest {_top(lines)}"
    shares = ", ".join(f"{name} {_share(lengths, at)}" for name, at in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)))
    yield f"lines a function         {shares}, longest {lengths[-1]}"
    usual = statistics.median(count for count, _ in widths)
    yield f"constructor parameters   median {usual:g}, widest {_top(widths)}"
    between = Counter(
        (package_of(module), package_of(target))
        for module, targets in edges.items()
        for target in targets
        if package_of(module) != package_of(target)
    )
    yield f"edges between packages   {len(between)} pairs, {between.total()} imports"
    for package in [ROOT_PACKAGE, *RULES["packages"]]:
        own = [f"{other} {count}" for (one, other), count in sorted(between.items()) if one == package]
        yield f"  {package:<12} {', '.join(own) or '-'}"
    circles = cycles(edges)
    yield f"cycles among modules     {len(circles)}"
    yield from (f"  {' '.join(circle)}" for circle in circles)


def _top(counted: Sequence[tuple[int, str]]) -> str:
    return ", ".join(f"{count} ({name})" for count, name in counted[:5])


def _share(ordered: Sequence[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _functions(sources: Collection[str]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def _constructors(sources: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield each written constructor with its number of parameters, without self; dataclasses are records."""
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                        given = inner.args
                        yield f"{module}.{node.name}", len(given.posonlyargs + given.args + given.kwonlyargs) - 1


def main(words: Sequence[str]) -> int:
    if list(words) == ["--write"]:
        ARCHITECTURE.write_text(with_table(ARCHITECTURE.read_text("utf-8")), "utf-8")
        return 0
    if words:
        print("usage: python -m docs.shape [--write]", file=sys.stderr)
        return 2
    print(*report(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
