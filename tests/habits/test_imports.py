"""No file imports itself through others: the imports of all files form no circle.

Imports inside functions count too. Those under ``if TYPE_CHECKING:`` do not: they are never
executed.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "anydevice": ROOT / "core",
    "anydevice_backends": ROOT / "backends",
    "anydevice_conformance": ROOT / "conformance",
}


def files_of(package, folder):
    """The module name of each Python file of a package, and its syntax tree."""
    for path in sorted((folder / package).rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def executed(node):
    """All nodes below one, without what stands under ``if TYPE_CHECKING:``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.orelse:
                yield statement
                yield from executed(statement)
        else:
            yield child
            yield from executed(child)


def imported(name, tree):
    """The dotted names that a file may import: modules, and names that could be modules."""
    package = name.split(".")[:-1]  # of "a.b.__init__" it is a.b, as of "a.b.c"
    for node in executed(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((base, f"{base}.{alias.name}") for alias in node.names)


def graph_of(trees):
    """For each file the files that it imports."""
    module = {name.removesuffix(".__init__"): name for name in trees}
    graph = {}
    for name, tree in trees.items():
        graph[name] = targets = set()
        for found in imported(name, tree):
            base, full = found if isinstance(found, tuple) else (found, found)
            targets.add(module.get(full, module.get(base)))
        targets -= {None, name}
    return graph


def circles_of(graph):
    """The groups of files of which each reaches each other one (components of more than one)."""
    reached = {}
    for start in graph:
        reached[start], waiting = set(), [start]
        while waiting:
            new = graph[waiting.pop()] - reached[start]
            reached[start] |= new
            waiting += new
    groups = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph
    }
    return sorted(sorted(group) for group in groups if group)


def parsed(**sources):
    return {name.replace("__", ".", 1): ast.parse(source) for name, source in sources.items()}


def test_no_file_imports_itself_through_others():
    trees = {}
    for package, folder in PACKAGES.items():
        trees.update(files_of(package, folder))
    graph = graph_of(trees)
    assert sum(map(len, graph.values())) > 1000, "the imports were not read"
    assert not circles_of(graph)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("import p.b", "import p.a"),
        ("from p import b", "from p.a import name"),
        ("from . import b", "from .a import name"),
        ("def late():\n    from p.b import name", "import p.a as other"),
        (
            "if TYPE_CHECKING:\n    import os\nelse:\n    import p.b",
            "try:\n    import p.a\nfinally: 0",
        ),
    ],
)
def test_a_circle_is_seen(first, second):
    assert circles_of(graph_of(parsed(p__a=first, p__b=second))) == [["p.a", "p.b"]]


def test_imports_for_type_checkers_and_one_way_imports_are_no_circle():
    first = "if typing.TYPE_CHECKING:\n    from p.b import name"
    assert not circles_of(graph_of(parsed(p__a=first, p__b="import p.a")))
    assert not circles_of(graph_of(parsed(p__a="import p.b", p__b="import os")))
