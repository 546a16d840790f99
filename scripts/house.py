#!/usr/bin/env python3
"""Measure the layout of the code against its limits. The exit code is 1 if a limit is exceeded.

    imports   circles between modules, and layers of the import contract in pyproject.toml
    sizes     lines of files and classes in swarm_node/ and protocol/, lines of files in tests/ and benchmarks/
    names     modules beside the packages of swarm_node/, public functions and classes defined in two modules
    options   help texts of configuration keys that stand in a second module
    calls     of a tokenizer outside of the module that turns its library's panics into errors

Imports under `TYPE_CHECKING` make no circle.
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
Modules = Mapping[str, ast.Module]


def modules(*folders: str) -> dict[str, ast.Module]:
    """Syntax trees of all Python files below `folders`, by the path from the root."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def name_of(path: str) -> str:
    return path.removeprefix("protocol/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(node: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Modules imported below a node, also inside functions, with the names taken from each."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module, [alias.name for alias in node.names]
    elif isinstance(node, ast.Import):
        yield from ((alias.name, []) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def circle(trees: Modules) -> list[str]:
    """The modules of one import circle; none if there is none."""
    known = {name_of(path) for path in trees}
    graph: dict[str, set[str]] = {}
    for path, tree in trees.items():
        taken = {
            longer if (longer := f"{module}.{name}") in known else module
            for module, names in imported(tree)
            for name in names or [""]
        }
        graph[name_of(path)] = (taken & known) - {name_of(path)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def lines(path: str) -> int:
    return len((ROOT / path).read_text().splitlines())


def longest_class(trees: Modules) -> tuple[int, str]:
    """(lines, name)."""
    classes = (
        ((node.end_lineno or 0) - node.lineno + 1, f"{path}: {node.name}")
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    return max(classes)


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
    cls, double, repeated, ring = longest_class(code), twice(code), options_twice(code), circle(code)
    direct = tokenizer_calls(code)
    rows: list[tuple[str, int, int, str]] = [
        ("modules in an import circle", len(ring), 0, " -> ".join(ring)),
        ("layers", len(layers), 10, ""),
        ("modules beside the packages", len(loose), 6, ", ".join(loose)),
        ("longest file", file[0], 450, file[1]),
        ("longest class", cls[0], 300, cls[1]),
        ("longest file of tests and benchmarks", other[0], 700, other[1]),
        ("public names in two modules", len(double), 3, "; ".join(double)),
        ("options declared twice", len(repeated), 0, "; ".join(repeated)),
        ("direct calls of a tokenizer", len(direct), 0, ", ".join(direct)),
    ]
    for what, measured, limit, where in rows:
        print(f"{what:37} {measured:5} of {limit:3}  {'too many: ' + where if measured > limit else ''}")
    print(f"{'lines of swarm_node and protocol':37} {sum(map(lines, code)):5}")
    return int(any(measured > limit for _, measured, limit, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
