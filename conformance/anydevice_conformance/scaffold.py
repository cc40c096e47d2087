"""``anydevice new-backend``: write the package of a new backend."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import anydevice
from anydevice.backend import INTERFACE_VERSION

__all__ = ["write_package"]

_TEMPLATES: Final = Path(__file__).with_name("templates")
#: Template to the path that it is written to.
_FILES: Final = {
    "pyproject.toml.txt": "pyproject.toml",
    "backend.py.txt": "{module}.py",
    "test_conformance.py.txt": "tests/test_conformance.py",
    "test_backend.py.txt": "tests/test_backend.py",
    "ci.yml.txt": ".github/workflows/conformance.yml",
    "README.md.txt": "README.md",
    "gitignore.txt": ".gitignore",
}


def write_package(
    name: str, device_type: str, folder: Path, *, imports: str | None = None
) -> list[Path]:
    """Write a complete package: backend, tests, CI file, README.

    Args:
        name: the distribution's name, such as ``"anydevice-foo"``; also the new folder's.
        device_type: torch's name of the device, such as ``"foo"``.
        folder: where the package's folder is made.
        imports: the vendor's torch package, such as ``"torch_foo"``; by default that name.

    Returns:
        The files written.

    Raises:
        ValueError: a name that cannot be one, or the folder is there already.
    """
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        raise ValueError(f"{name!r} is not a name of a distribution, such as 'anydevice-foo'")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", device_type):
        raise ValueError(f"{device_type!r} is not a torch device type, such as 'foo'")
    package = imports or f"torch_{device_type}"
    if not re.fullmatch(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", package):
        raise ValueError(f"{package!r} is not a module, such as 'torch_foo'")
    root = folder / name
    if root.exists():
        raise ValueError(f"{root} is there already; choose another name or --output")
    major, minor = anydevice.__version__.split(".")[:2]
    words = {
        "NAME": name,
        "MODULE": re.sub(r"[^A-Za-z0-9]+", "_", name).lower(),
        "TYPE": device_type,
        "CLASS": "".join(part.capitalize() for part in device_type.split("_")),
        "TORCH_PACKAGE": package,
        "ANYDEVICE": f"{major}.{minor}",
        "NEXT": f"{int(major) + 1}.0",
        "INTERFACE": INTERFACE_VERSION,
    }
    written = []
    for template, target in _FILES.items():
        text = (_TEMPLATES / template).read_text(encoding="utf-8")
        for word, value in words.items():
            text = text.replace(f"@{word}@", value)
        path = root / target.format(module=words["MODULE"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
