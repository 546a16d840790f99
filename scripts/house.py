#!/usr/bin/env python3
"""Measure the layout of the code against its limits. The exit code is 1 if a limit is exceeded.

    imports   circles between modules, layers of the import contract in pyproject.toml, modules that a module imports
    sizes     lines of files in swarm_node/ and protocol/ and of all of them, lines of files in tests/ and benchmarks/
    classes   attributes of a class, sections of the configuration left out
    names     modules beside the packages of swarm_node/, public functions and classes defined in two modules
    options   help texts of configuration keys that stand in a second module
    calls     of a tokenizer outside of the module that turns its library's panics into errors

Imports under `TYPE_CHECKING` count, but for those of the Python API, which the package loads when they are used.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOKENIZING = "swarm_node/policy/tokenizing.py"
TOKENIZERS = {"tokenizer", "backend_tokenizer"}  # what tokenizers are called
API = "swarm_node/__init__.py"
Modules = Mapping[str, ast.Module]


def modules(*folders: str) -> dict[str, ast.Module]:
    """Syntax trees of all Python files below `folders`, by the path from the root."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def name_of(path: str) -> str:
    return path.removeprefix("protocol/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(node: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Modules imported below a node, also inside functions, with the names taken from each."""
    if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module, [alias.name for alias in node.names]
    elif isinstance(node, ast.Import):
        yield from ((alias.name, []) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def import_graph(trees: Modules) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports."""
    known = {name_of(path) for path in trees}
    graph: dict[str, set[str]] = {}
    for path, tree in trees.items():
        taken = {
            longer if (longer := f"{module}.{name}") in known else module
            for module, names in imported(tree)
            for name in names or [""]
        }
        graph[name_of(path)] = (taken & known) - {name_of(path)} if path != API else set()
    return graph


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of one import circle; none if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def lines(path: str) -> int:
    return len((ROOT / path).read_text().splitlines())


def attributes(cls: ast.ClassDef) -> set[str]:
    """What its methods set, and what it declares."""
    declared = (node.targets if isinstance(node, ast.Assign) else [node] for node in cls.body)
    names = (target.target if isinstance(target, ast.AnnAssign) else target for each in declared for target in each)
    return {name.id for name in names if isinstance(name, ast.Name)} | {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def fullest_class(trees: Modules) -> tuple[int, str]:
    """(attributes, name)."""
    return max(
        (len(attributes(node)), f"{path}: {node.name}")
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "Section" not in map(ast.unparse, node.bases)
    )


def twice(trees: Modules) -> list[str]:
    """Public functions and classes that two modules define."""
    places = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                places[node.name].append(path)
    return [f"{name} ({', '.join(found)})" for name, found in places.items() if len(found) > 1 and name != "main"]


def options_twice(trees: Modules) -> list[str]:
    """Help texts of configuration keys that a second module repeats."""
    helps = {}
    for path, tree in trees.items():
        if path.startswith("swarm_node/config/"):
            for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
                for node in section.body:
                    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                        helps[" ".join(str(node.value.value).split())] = path
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = " ".join(node.value.split())
                if helps.get(text, path) != path and len(text) > 20:
                    found.append(f"{path}:{node.lineno}: {text[:60]}")
    return found


def tokenizer_calls(trees: Modules) -> list[str]:
    """Calls of a tokenizer, or of its methods, that no panic of its library is caught around."""

    def is_tokenizer(node: ast.expr) -> bool:
        return (isinstance(node, ast.Name) and node.id in TOKENIZERS) or (
            isinstance(node, ast.Attribute) and node.attr in TOKENIZERS
        )

    return [
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        if path != TOKENIZING
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (is_tokenizer(node.func) or (isinstance(node.func, ast.Attribute) and is_tokenizer(node.func.value)))
    ]


def main() -> int:
    code, rest = modules("swarm_node", "protocol/swarm_protocol"), modules("tests", "benchmarks", "scripts")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    loose = [
        path for path in code if path.startswith("swarm_node/") and path.count("/") == 1 and "__init__" not in path
    ]
    file, other = (max((lines(path), path) for path in trees) for trees in (code, rest))
    graph = import_graph(code)
    cls, double, repeated, ring = fullest_class(code), twice(code), options_twice(code), circle(graph)
    direct, imports = tokenizer_calls(code), max((len(taken), name) for name, taken in graph.items())
    rows: list[tuple[str, int, int, str]] = [
        ("modules in an import circle", len(ring), 0, " -> ".join(ring)),
        ("layers", len(layers), 10, ""),
        ("modules beside the packages", len(loose), 6, ", ".join(loose)),
        ("longest file", file[0], 450, file[1]),
        ("most attributes of a class", cls[0], 38, cls[1]),  # this limit and the next two only fall
        ("most imports of a module", imports[0], 39, imports[1]),
        ("lines of swarm_node and protocol", sum(map(lines, code)), 63_946, "delete some"),
        ("longest file of tests and benchmarks", other[0], 700, other[1]),
        ("public names in two modules", len(double), 3, "; ".join(double)),
        ("options declared twice", len(repeated), 0, "; ".join(repeated)),
        ("direct calls of a tokenizer", len(direct), 0, ", ".join(direct)),
    ]
    for what, measured, limit, where in rows:
        print(f"{what:37} {measured:6} of {limit:6}  {'too many: ' + where if measured > limit else ''}")
    return int(any(measured > limit for _, measured, limit, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
