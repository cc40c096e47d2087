"""``anydevice estimate``: how much memory a model needs, in each dtype, to run and to train."""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

import torch
from torch import nn

from anydevice.cli.empty_model import add_model_arguments, read_empty_model
from anydevice.cli.network import cache_only_when_unreachable
from anydevice.cli.text import size_text, table
from anydevice.placement import PlacementOptions, find_blocks, resolve_device_map
from anydevice.sizes import compute_module_sizes

__all__ = ["register"]

_DTYPES: Final = ("float32", "bfloat16", "float16", "int8", "int4")
#: Copies of each parameter while it is trained with Adam: itself, its gradient, two moments.
_ADAM_COPIES: Final = 4
_HOST_BYTES: Final = 1 << 50


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "estimate",
        description="For each dtype: bytes of the weights and of the largest block, what training "
        "with Adam takes, and the smallest device that runs the model with and without offload "
        "(weights alone, without activations). Only the config or headers are read.",
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--dtypes", nargs="+", choices=_DTYPES, default=list(_DTYPES[:1] + _DTYPES[2:]), metavar="D"
    )
    parser.add_argument(
        "--library_name", "--library-name", choices=["transformers"], help="the only one there is"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    with cache_only_when_unreachable(args.model):
        model, _ = read_empty_model(args)
    found = [_estimate(model, dtype) for dtype in args.dtypes]
    if args.json:
        parameters = sum(p.numel() for p in model.parameters())
        print(
            json.dumps(
                {
                    "model": args.model,
                    "class": type(model).__name__,
                    "parameters": parameters,
                    "estimates": found,
                },
                indent=2,
            )
        )
        return 0
    head = ["DTYPE", "WEIGHTS", "LARGEST BLOCK", "TRAINING (ADAM)", "DEVICE", "WITH OFFLOAD"]
    keys = ["weights", "largest_block", "training", "device", "device_with_offload"]
    rows = [[str(f["dtype"]), *(size_text(f[k]) for k in keys)] for f in found]
    print(table(head, rows))
    return 0


def _estimate(model: nn.Module, dtype: str) -> dict[str, Any]:
    """Bytes in one dtype."""
    sizes = compute_module_sizes(model, dtype)
    blocks = find_blocks(model)
    largest = max(blocks, key=lambda name: sizes.get(name, 0), default="")
    total = sizes.get("", 0)
    return {
        "dtype": dtype,
        "weights": total,
        "largest_block": sizes.get(largest, 0),
        "largest_block_name": largest,
        "training": _training(model, dtype),
        "device": total,
        "device_with_offload": _least_device(model, dtype, total),
    }


def _training(model: nn.Module, dtype: str) -> int:
    """Parameters, gradients and Adam's moments, all in ``dtype``, and the buffers."""
    everything = compute_module_sizes(model, dtype).get("", 0)
    buffers = compute_module_sizes(model, dtype, buffers_only=True).get("", 0)
    return _ADAM_COPIES * (everything - buffers) + buffers


def _least_device(model: nn.Module, dtype: str, high: int) -> int:
    """The smallest budget with which the planner runs every block on the device.

    At most ``high``, the whole model; found to within a hundredth.
    """

    def runs(size: int) -> bool:
        held = dtype if dtype.startswith("int") else getattr(torch, dtype)
        options = PlacementOptions(
            {0: size, "cpu": _HOST_BYTES}, dtype=held, prefetch=False, disk=False, pretended=True
        )
        plan = resolve_device_map(model, "sequential", options)
        devices = {str(device) for device in plan.values()}
        return not plan.host_run and (plan.main_device is not None or devices == {"0"})

    low = 0
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if runs(middle) else (middle, high)
    return high
