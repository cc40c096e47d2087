"""The calls that a backend makes to torch and to its vendor's module, read from its source.

What a backend inherits from `anydevice.backend.DeviceBackend` is read, too, unless it overrides it
or does not claim the capability that it belongs to. These spellings are understood, also through a
local variable::

    self.module.name(...)           torch.<device type>.name(...)      torch.any.name(...)
    getattr(self.module, "name")(...)                  may be missing if a default is given
    self._anydevice_query("name", "other", index)    or else torch.accelerator.other(index)
    self._anydevice_function("name")(...)            or else torch.accelerator.name(...)
    stream.name(...), event.name(...)                  methods of the module's Stream and Event
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import anydevice.backend

__all__ = ["Call", "read_calls"]

#: The capability without which anydevice never calls a member.
_NEEDS = {
    "new_stream": "streams",
    "current_stream": "streams",
    "use_stream": "streams",
    "record_event": "streams",
    "wait_event": "streams",
    "synchronize_event": "streams",
    "pin_memory": "pinned_memory",
    "manual_seed_all": "device_rng",
    "rng_state": "device_rng",
    "set_rng_state": "device_rng",
    "new_grad_scaler": "grad_scaling",
    "_anydevice_cached_bytes": "caching_allocator",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A function that a backend names.

    Attributes:
        owner: ``"module"`` for the vendor's module, or ``"torch"``.
        name: dotted, within the owner.
        optional: the backend copes when it is missing.
        fallback: what it calls in torch instead, dotted.
    """

    owner: Literal["module", "torch"]
    name: str
    optional: bool = False
    fallback: str = ""


@dataclasses.dataclass(frozen=True)
class Call(Target):
    """A call of a `Target`.

    Attributes:
        positional: how many positional arguments.
        keywords: the names of the others.
        starred: whether ``*`` or ``**`` adds more, so that the number is not known.
        file: where it stands.
        line: where in the file.
    """

    positional: int = 0
    keywords: tuple[str, ...] = ()
    starred: bool = False
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        arguments = [*["_"] * self.positional, *(f"{k}=_" for k in self.keywords)]
        return f"{self.owner}.{self.name}({', '.join(arguments)})"


def read_calls(file: Path, device_type: str) -> list[Call]:
    """Every call of the backend of ``device_type`` in a source file.

    Raises:
        LookupError: the file has no class with that ``device_type``.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = [c for c in classes.values() if _literal(c, "device_type") == device_type]
    if not found:
        raise LookupError(f"{file} has no class with device_type = {device_type!r}")
    base_file = Path(anydevice.backend.__file__)
    base = next(
        node
        for node in ast.parse(base_file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "DeviceBackend"
    )
    chain = [(node, str(file)) for node in _with_bases(found[0], classes)]
    chain.append((base, str(base_file)))
    outside = [n for n in tree.body if not isinstance(n, (ast.ClassDef, ast.FunctionDef))]
    calls = list(_Reader(device_type, str(file)).read(ast.Module(outside, [])))
    for definition, path in _reachable(chain):
        calls += _Reader(device_type, path).read(definition)
    return calls


def _with_bases(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    yield node
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _with_bases(classes[base.id], classes)


def _literal(node: ast.ClassDef, name: str) -> object:
    value = _assigned(node, name)
    return value.value if isinstance(value, ast.Constant) else None


def _assigned(node: ast.ClassDef, name: str) -> ast.expr | None:
    for statement in node.body:
        targets: Sequence[ast.expr] = ()
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = (statement.target,)
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return statement.value  # type: ignore[attr-defined,no-any-return]
    return None


# ---------------------------------------------------------------------- which methods run

_Chain = Sequence[tuple[ast.ClassDef, str]]


def _reachable(chain: _Chain) -> Iterator[tuple[ast.AST, str]]:
    """Each method that anydevice may call, and what those call, with its file."""
    claimed = _claimed(chain)
    public = {name for node, _ in chain for name in _methods(node) if not name.startswith("_")}
    todo = [(0, name) for name in sorted(public)]
    done: set[tuple[int, str]] = set()
    while todo:
        start, name = todo.pop()
        level = next((i for i in range(start, len(chain)) if name in _methods(chain[i][0])), None)
        needs = _NEEDS.get(name)
        if level is None or (level, name) in done or (needs and needs not in claimed):
            continue
        done.add((level, name))
        definition = _methods(chain[level][0])[name]
        yield definition, chain[level][1]
        for node in ast.walk(definition):
            if isinstance(node, ast.Attribute):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    todo.append((0, node.attr))
                elif isinstance(node.value, ast.Call) and _is_name(node.value.func, "super"):
                    todo.append((level + 1, node.attr))


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}


def _claimed(chain: _Chain) -> set[str]:
    """The capabilities that may be claimed: all that are not plainly False."""
    for node, _ in chain:
        value = _assigned(node, "capabilities")
        if isinstance(value, ast.Call):
            return {
                k.arg
                for k in value.keywords
                if k.arg and not (isinstance(k.value, ast.Constant) and k.value.value is False)
            }
    return set()


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


# ---------------------------------------------------------------------- which calls they make


class _Reader(ast.NodeVisitor):
    """Collects the calls of one function."""

    def __init__(self, device_type: str, file: str) -> None:
        self._device_type, self._file = device_type, file
        self._variables: dict[str, Target] = {}
        self._calls: list[Call] = []

    def read(self, node: ast.AST) -> list[Call]:
        self.visit(node)
        return self._calls

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        target = self._target(node.value)
        if target is not None and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self._variables[node.targets[0].id] = target

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        target = self._target(node.value) if node.value is not None else None
        if target is not None and isinstance(node.target, ast.Name):
            self._variables[node.target.id] = target

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        queried = self._queried(node)
        target = queried or self._target(node.func)
        if target is None or not target.name:
            return
        arguments = node.args[2:] if queried else node.args
        self._calls.append(
            Call(
                **dataclasses.asdict(target),
                positional=sum(not isinstance(a, ast.Starred) for a in arguments),
                keywords=tuple(k.arg for k in node.keywords if k.arg),
                starred=any(isinstance(a, ast.Starred) for a in arguments)
                or any(k.arg is None for k in node.keywords),
                file=self._file,
                line=node.lineno,
            )
        )

    def _queried(self, node: ast.Call) -> Target | None:
        names = _self_call(node, "_anydevice_query")
        if len(names) < 2:
            return None
        return Target("module", names[0], fallback=f"accelerator.{names[1]}")

    def _target(self, node: ast.expr) -> Target | None:
        """What an expression names, if it is torch's or the vendor's."""
        if isinstance(node, ast.Name):
            if node.id == "torch":
                return Target("torch", "")
            if node.id in ("stream", "event"):
                return Target("module", node.id.capitalize(), optional=True)
            return self._variables.get(node.id)
        if isinstance(node, ast.Attribute):
            if _is_name(node.value, "self"):
                return Target("module", "") if node.attr == "module" else None
            return self._within(self._target(node.value), node.attr)
        if isinstance(node, ast.Call):
            names = _self_call(node, "_anydevice_function")
            if names:
                return Target("module", names[0], fallback=f"accelerator.{names[0]}")
            if _is_name(node.func, "getattr") and isinstance(node.args[1], ast.Constant):
                found = self._within(self._target(node.args[0]), str(node.args[1].value))
                if found is not None and len(node.args) > 2:
                    return dataclasses.replace(found, optional=True)
                return found
        return None

    def _within(self, owner: Target | None, name: str) -> Target | None:
        if owner is None:
            return None
        if owner.owner == "torch" and not owner.name and name == self._device_type:
            return Target("module", "")
        return dataclasses.replace(owner, name=f"{owner.name}.{name}".lstrip("."))


def _self_call(node: ast.Call, name: str) -> list[str]:
    """The leading strings of a call ``self.<name>("a", "b", ...)``; empty for any other call."""
    if not (isinstance(node.func, ast.Attribute) and node.func.attr == name):
        return []
    if not _is_name(node.func.value, "self"):
        return []
    texts = [a.value if isinstance(a, ast.Constant) else None for a in node.args]
    return [text for text in texts if isinstance(text, str)]
