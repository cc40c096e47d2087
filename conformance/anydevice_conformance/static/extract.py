r"""Make the data file of a vendor's published API, from its wheel or an installed package.

    python -m anydevice_conformance.static.extract torch.xpu --device-type xpu -o xpu.json
    python -m anydevice_conformance.static.extract torch_npu.npu --device-type npu \
        --wheel torch_npu-2.14.0-cp311-cp311-manylinux_2_28_x86_64.whl -o npu.json

The source is read, never imported: a vendor's package needs its driver to be imported.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.metadata
import importlib.util
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from anydevice_conformance.static.surface import Surface

__all__ = ["main", "read_installed", "read_wheel"]

#: The source of a module by dotted name, and whether it is a package; None where there is none.
_Reader: TypeAlias = Callable[[str], "tuple[str, bool] | None"]
#: What a module's names are; None for a value.
_Names: TypeAlias = "dict[str, _Definition | None]"


class _Definition(NamedTuple):
    """A function or class, and the names that its own module has for its base classes."""

    node: ast.FunctionDef | ast.ClassDef
    scope: _Names


def read_wheel(wheel: Path, module: str, device_type: str) -> Surface:
    """Read a module's public names from a wheel."""
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        entries = set(archive.namelist())

        def read(dotted: str) -> tuple[str, bool] | None:
            path = dotted.replace(".", "/")
            for entry in (f"{path}/__init__.py", f"{path}.py"):
                if entry in entries:
                    return archive.read(entry).decode(), entry.endswith("__init__.py")
            return None

        names = _signatures(_Collector(module, read).names(module))
    return Surface(device_type, module, version, f"the wheel of {name} {version}", names)


def read_installed(module: str, device_type: str) -> Surface:
    """Read a module's public names from an installed package. Its parent package is imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{module} is not installed")
    folder = Path(spec.origin).parent

    def read(dotted: str) -> tuple[str, bool] | None:
        path = folder.joinpath(*dotted.split(".")[len(module.split(".")) :])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file.read_text(encoding="utf-8"), file.name == "__init__.py"
        return None

    package = module.partition(".")[0]
    version = importlib.metadata.version(package)
    names = _signatures(_Collector(module, read).names(module))
    return Surface(device_type, module, version, f"{package} {version} as installed", names)


# ---------------------------------------------------------------------- names


class _Collector:
    """Finds the names that a module defines, or re-exports from its own submodules."""

    def __init__(self, root: str, read: _Reader) -> None:
        self._root, self._read = root, read
        self._known: dict[str, _Names] = {}

    def names(self, module: str) -> _Names:
        """All names of a module; while modules import each other, those found so far."""
        if module in self._known:
            return self._known[module]
        names = self._known[module] = {}
        source, is_package = self._read(module) or ("", False)
        for statement in _statements(ast.parse(source).body):
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                names[statement.name] = _Definition(statement, names)
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        names[target.id] = _alias(statement.value, names)
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                names[statement.target.id] = _alias(statement.value, names)
            elif isinstance(statement, ast.ImportFrom):
                names |= self._imported(statement, module, is_package)
        return names

    def _imported(self, statement: ast.ImportFrom, module: str, is_package: bool) -> _Names:
        origin = statement.module or ""
        if statement.level:
            parts = module.split(".")
            parts = parts[: len(parts) - statement.level + is_package]
            origin = ".".join([*parts, origin]).rstrip(".")
        if origin != self._root and not origin.startswith(f"{self._root}."):
            return {}  # another package's name is not this module's API
        there = self.names(origin)
        if statement.names[0].name == "*":
            return {name: node for name, node in there.items() if not name.startswith("_")}
        return {
            alias.asname or alias.name: there[alias.name]
            for alias in statement.names
            if alias.name in there
        }


def _alias(value: ast.expr | None, names: _Names) -> _Definition | None:
    """What a name stands for that is assigned from another name."""
    return names.get(value.id) if isinstance(value, ast.Name) else None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements, those under ``if`` and ``try`` too."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try)):
            for part in (statement.orelse, getattr(statement, "handlers", []), statement.body):
                for inner in part:
                    inside = inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    yield from _statements(inside)
        else:
            yield statement


# ---------------------------------------------------------------------- signatures


def _signatures(names: _Names) -> dict[str, str | None]:
    result: dict[str, str | None] = {}
    for name, definition in names.items():
        if name.startswith("_"):
            continue
        if definition is None:
            result[name] = None
        elif isinstance(definition.node, ast.FunctionDef):
            result[name] = _text(definition.node.args)
        else:
            result |= _class_signatures(name, definition.node, definition.scope)
    return result


def _class_signatures(name: str, node: ast.ClassDef, scope: _Names) -> dict[str, str | None]:
    result: dict[str, str | None] = {name: None}
    for base in reversed(node.bases):
        inherited = scope.get(base.id) if isinstance(base, ast.Name) else None
        if inherited and isinstance(inherited.node, ast.ClassDef) and inherited.node is not node:
            result |= _class_signatures(name, inherited.node, inherited.scope)
    for method in node.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        if method.name in ("__init__", "__new__"):
            result[name] = _text(method.args, skip_first=True)
        elif not method.name.startswith("_"):
            decorators = [d.id for d in method.decorator_list if isinstance(d, ast.Name)]
            is_static = "staticmethod" in decorators
            result[f"{name}.{method.name}"] = _text(method.args, skip_first=not is_static)
    return result


def _text(arguments: ast.arguments, *, skip_first: bool = False) -> str:
    """``(device=None, *, priority=0)``: without annotations, and without ``self``."""
    arguments = copy.deepcopy(arguments)
    if skip_first and arguments.args:
        del arguments.args[0]
        del arguments.defaults[: max(0, len(arguments.defaults) - len(arguments.args))]
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return f"({ast.unparse(arguments)})"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("module", help="the vendor's module, such as torch_npu.npu")
    parser.add_argument("--device-type", required=True)
    parser.add_argument("--wheel", type=Path, help="read it from this wheel")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(argv)
    if options.wheel is not None:
        surface = read_wheel(options.wheel, options.module, options.device_type)
    else:
        surface = read_installed(options.module, options.device_type)
    if not surface.names:
        raise SystemExit(f"no public name found in {options.module}")
    surface.save(options.output)
    print(f"{options.output}: {len(surface.names)} names of {surface.title}")


if __name__ == "__main__":
    main()
