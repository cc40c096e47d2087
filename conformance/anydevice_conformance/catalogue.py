"""Which checks there are: read from the suite's source, without running or importing it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import re
from pathlib import Path
from typing import Final

__all__ = ["SUITE_FOLDER", "Check", "load_catalogue", "suite_digest"]

SUITE_FOLDER: Final = Path(__file__).with_name("suite")
_NAME: Final = re.compile(r"test_([A-Z]{3})_(\d{3})(?:_|$)")


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of the suite.

    Attributes:
        name: its function's name, such as ``"test_MOV_007_strides"``.
        paragraph: the id of the paragraph that it is for.
        module: the file that it stands in, without suffix.
        title: what holds when it passes.
        found: what was found when it fails.
        fix: what to do then.
    """

    name: str
    paragraph: str
    module: str
    title: str
    found: str
    fix: str


@functools.cache
def load_catalogue() -> dict[str, Check]:
    """All checks by name, in the specification's order."""
    from anydevice_conformance.specification import GROUPS

    checks = []
    for file in sorted(SUITE_FOLDER.glob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            match = _NAME.match(node.name) if isinstance(node, ast.FunctionDef) else None
            if match and isinstance(node, ast.FunctionDef):
                checks.append(
                    Check(
                        node.name,
                        f"{match[1]}-{match[2]}",
                        file.stem,
                        **_help(ast.get_docstring(node, clean=False)),
                    )
                )
    order = list(GROUPS)
    checks.sort(key=lambda c: (order.index(c.paragraph[:3]), c.paragraph, c.name))
    return {check.name: check for check in checks}


@functools.cache
def suite_digest() -> str:
    """A hash of the suite's source: another one is another suite."""
    found = hashlib.sha256()
    for file in sorted(SUITE_FOLDER.glob("*.py")):
        found.update(file.name.encode() + b"\0" + file.read_bytes().replace(b"\r\n", b"\n"))
    return found.hexdigest()[:16]


def _help(docstring: str | None) -> dict[str, str]:
    text = inspect.cleandoc(docstring or "")
    title, _, rest = text.partition("\n")
    found, _, fix = rest.partition("Fix:")
    parts = {"title": title, "found": found.replace("Found:", ""), "fix": fix}
    return {name: " ".join(part.split()) for name, part in parts.items()}
