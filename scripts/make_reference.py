"""Write docs/reference.md: every public name of anydevice with its signature and one line.

usage: python scripts/make_reference.py
"""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
MODULES = (
    "anydevice",
    "anydevice.data_loader",
    "anydevice.distributed",
    "anydevice.engines",
    "anydevice.hooks",
    "anydevice.state",
    "anydevice.tracking",
    "anydevice.utils",
)
_HEAD = """\
# Reference

Every public name, with the first line of its docstring; `help(name)` shows its arguments,
their units and the errors it raises. Written by `python scripts/make_reference.py`. The names of
Hugging Face Accelerate's big-model inference are here under the paths that it has them under, also
`anydevice.big_modeling`, `anydevice.utils.modeling`, `anydevice.utils.offload` and
`anydevice.utils.operations`.
"""
_FOOT = """
All errors derive from `anydevice.AnyDeviceError` and from the natural builtin:

```text
{tree}
```
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD.rstrip()]
    for module in MODULES:
        parts += [f"\n## `{module}`\n", "| name | what it is |", "| --- | --- |", *_rows(module)]
    errors = importlib.import_module("anydevice.errors")
    tree = (inspect.getdoc(errors) or "").split("::\n\n")[1].split("\n\n")[0]
    return "\n".join(parts) + "\n" + _FOOT.format(tree=inspect.cleandoc(tree))


def _rows(module: str) -> Iterator[str]:
    owner = importlib.import_module(module)
    for name in owner.__all__:
        yield f"| `{name}{_arguments(getattr(owner, name))}` | {_summary(module, name)} |"


def _arguments(thing: Any) -> str:
    """Names of the arguments; those that may be left out are in brackets, as in Python's docs."""
    if not inspect.isfunction(thing):
        return ""
    needed: list[str] = []
    optional: list[str] = []
    for name, parameter in inspect.signature(thing).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        (needed if parameter.default is parameter.empty else optional).append(name)
    more = "[, ...]" if needed and optional else "[...]" if optional else ""
    return f"({', '.join(needed)}{more})"


def _summary(module: str, name: str) -> str:
    """The first sentence or paragraph of a docstring, on one line."""
    thing = getattr(importlib.import_module(module), name)
    if isinstance(thing, str):
        return "The version of the package."
    text = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
    return re.sub(r"``(.+?)``", r"`\1`", text).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    # The table of names says where each is: it changes when the reference does.
    runpy.run_path(str(Path(__file__).with_name("make_names.py")), run_name="__main__")
