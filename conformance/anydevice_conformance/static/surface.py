"""A vendor's published API as data: names, signatures, and where they were read."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
from pathlib import Path

__all__ = ["Surface", "parse_signature"]


@dataclasses.dataclass(frozen=True)
class Surface:
    """The public names of a vendor's module.

    Attributes:
        device_type: the torch device type.
        module: where the vendor defines them, such as ``"torch_npu.npu"``.
        version: of the vendor's package.
        source: where it was read, for a person.
        names: signature by name, without annotations, such as ``"(device=None)"``; None for what
            is no function, or whose signature is not to be seen. A class has its constructor's,
            and its methods stand as ``"Stream.record_event"``, without ``self``.
    """

    device_type: str
    module: str
    version: str
    source: str
    names: dict[str, str | None]

    @property
    def title(self) -> str:
        """Module, version and source, for messages."""
        return f"{self.module} {self.version}, {self.source}"

    def like(self, name: str) -> str | None:
        """The public name nearest in spelling."""
        near = difflib.get_close_matches(name, self.names, n=1)
        return near[0] if near else None

    @classmethod
    def load(cls, file: Path | str) -> Surface:
        """Read a file that `save` wrote, named by a path or a text."""
        return cls(**json.loads(Path(file).read_text(encoding="utf-8")))

    def save(self, file: Path | str) -> None:
        """Write as JSON, names in order, so that versions can be compared line by line."""
        data = dataclasses.asdict(self) | {"names": dict(sorted(self.names.items()))}
        Path(file).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def parse_signature(text: str) -> inspect.Signature:
    """Read a signature such as ``"(device=None, *, priority=0)"``. Defaults are kept as text."""
    function = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments, kinds = function.args, inspect.Parameter
    positional: list[tuple[str, inspect._ParameterKind]]
    positional = [(a.arg, kinds.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    positional += [(a.arg, kinds.POSITIONAL_OR_KEYWORD) for a in arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    parameters = [_parameter(*p, d) for p, d in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg.arg, kinds.VAR_POSITIONAL, None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument.arg, kinds.KEYWORD_ONLY, default))
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg.arg, kinds.VAR_KEYWORD, None))
    return inspect.Signature(parameters)


class _Text(str):
    """A default as it stands in the source."""

    def __repr__(self) -> str:
        return str(self)


def _parameter(
    name: str, kind: inspect._ParameterKind, default: ast.expr | None
) -> inspect.Parameter:
    value = inspect.Parameter.empty if default is None else _Text(ast.unparse(default))
    return inspect.Parameter(name, kind, default=value)
