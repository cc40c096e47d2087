"""Write docs/names.md: where each name of the reference's pages is.

usage: python scripts/make_names.py

The names on the reference's five pages stand in the page itself (first column); what is read anew
is where each is, and what else ``anydevice.utils`` offers.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "names.md"
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_ROW = re.compile(r"^\| `(accelerate\.[\w.]+)` \|", re.MULTILINE)
_OTHERS = "What the reference's page on utilities does not head, and programs import"
_HEAD = """# Where each name is

Every name on the five pages of the reference that this project follows. Each is here at the same
path, with `anydevice` in place of `accelerate`; the second column is the module that defines it.
Written by `python scripts/make_names.py`; a test imports each name.
"""
_END = """
`anydevice.utils` also answers for names that no list can hold: `is_foo_available` says whether a
device of type `foo` is here, or a package of that name is installed; `install_foo` refuses and
names what to install.
"""


def resolve(path: str) -> Any:
    """What a dotted path names: modules as far as they go, then attributes; None where nothing."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found
    return None


def home_of(path: str) -> str:
    """The module that defines what a path names; empty where nothing has the name."""
    thing = resolve(path)
    if thing is None:
        return ""
    module = str(getattr(thing, "__module__", ""))
    if not module.startswith("anydevice"):  # a constant, or a property
        module = path.rpartition(".")[0]
    return module


def here(name: str) -> str:
    """The path of a name of the reference here."""
    return name.replace("accelerate", "anydevice", 1)


def names(page: str) -> dict[str, list[str]]:
    """The reference's names on the page, by section."""
    pieces = _SECTION.split(page)[1:]
    sections = zip(pieces[::2], pieces[1::2], strict=True)
    found = {title: _ROW.findall(body) for title, body in sections}
    return {title: rows for title, rows in found.items() if rows}


def page() -> str:
    """The page as it should be."""
    import anydevice.utils

    sections = names(PAGE.read_text(encoding="utf-8"))
    lines = [_HEAD]
    for title, found in sections.items():
        lines += [f"## {title}", "", "| reference | defined in |", "| --- | --- |"]
        for name in found:
            home = home_of(here(name))
            lines.append(f"| `{name}` | {f'`{home}`' if home else 'not yet'} |")
        lines.append("")
    lines += [f"## {_OTHERS}", "", "| here | defined in |", "| --- | --- |"]
    listed = {name.rpartition(".")[2] for found in sections.values() for name in found}
    for name in sorted(set(anydevice.utils.__all__) - listed, key=str.lower):
        path = f"anydevice.utils.{name}"
        lines.append(f"| `{path}` | `{home_of(path)}` |")
    return "\n".join([*lines, _END])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
