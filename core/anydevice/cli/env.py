"""``anydevice env``: what a bug report needs, plugins and their faults included."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from typing import Any, Final

__all__ = ["describe_environment", "register"]

_PACKAGES: Final = (
    "torch",
    "safetensors",
    "huggingface_hub",
    "transformers",
    "accelerate",
    "peft",
    "numpy",
    "pluggy",
)
_PREFIXES: Final = ("ANYDEVICE_", "ACCELERATE_", "FSDP_", "TORCH_", "PYTORCH_", "OMP_NUM_THREADS")
#: Variables whose values are not shown.
_SECRET: Final = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "env",
        description="Print versions, devices, every backend plugin with its faults, the "
        "configuration of launch, and the environment variables that matter.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    found = describe_environment()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for heading, content in found.items():
        print(f"{heading}:")
        print("\n".join(f"  {line}" for line in _lines(content)) or "  none")
    return 0


def describe_environment() -> dict[str, Any]:
    """Everything, by heading. A part that fails says why, and the others are still there."""
    import torch

    from anydevice import __version__
    from anydevice.cli.backends import describe_backends
    from anydevice.cli.devices import describe_devices

    versions = {"anydevice": __version__, "python": sys.version.split()[0]}
    versions |= {name: _version(name) for name in _PACKAGES}
    return {
        "versions": versions,
        "system": {
            "platform": platform.platform(),
            "cores": str(os.cpu_count()),
            "torch threads": str(torch.get_num_threads()),
            "torch.distributed": str(torch.distributed.is_available()),
        },
        "devices": _or_fault(describe_devices),
        "backends": _or_fault(describe_backends),
        "launch configuration": _or_fault(_configuration),
        "environment": {
            name: "(hidden)" if any(word in name for word in _SECRET) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES)
        },
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _configuration() -> dict[str, Any]:
    from anydevice.launch.config_file import find_config, read_config

    path = find_config()
    if path is None:
        return {"file": "none"}
    config = read_config(path)
    return {"file": str(path), **{k: str(v) for k, v in config.values.items()}}


def _or_fault(function: Any) -> Any:
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - a report on a broken machine must still be written
        return {"fault": f"{type(error).__name__}: {error}"}


def _lines(content: Any) -> list[str]:
    if isinstance(content, dict):
        return [f"{key}: {value}" for key, value in content.items()]
    return [
        ", ".join(f"{k}: {_shown(k, v)}" for k, v in entry.items() if v not in ("", []))
        for entry in content
    ]


def _shown(key: str, value: Any) -> str:
    from anydevice.cli.text import size_text

    if key in ("free", "total"):
        return size_text(value)
    return ", ".join(value) if isinstance(value, list) else str(value)
