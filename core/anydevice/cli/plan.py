"""``anydevice plan``: where a model's weights would go, without the weights or the devices."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import nn

from anydevice.cli.empty_model import add_model_arguments, held_dtype, read_empty_model
from anydevice.cli.given_machine import HOST, Machine, read_machine
from anydevice.cli.network import cache_only_when_unreachable
from anydevice.cli.plan_hosts import HostsRequest, plan_hosts, read_link
from anydevice.cli.running import Running, add_caches, read_running
from anydevice.cli.text import size_text, table
from anydevice.errors import OptionError
from anydevice.placement import Placement, PlacementOptions, resolve_device_map
from anydevice.placement.pictures import picture_path
from anydevice.text import read_bytes
from anydevice.weights import covering_name

__all__ = ["HINTS", "prepare", "register"]

#: Options of other commands, and what says the same here.
HINTS: Final = {
    "--max-memory": "give --device NAME=SIZE for each accelerator, --cpu SIZE and --disk SIZE",
    "--max_memory": "give --device NAME=SIZE for each accelerator, --cpu SIZE and --disk SIZE",
}

_DISK: Final = "disk"


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        usage="anydevice plan MODEL [options]",
        description="Plan the placement of a model over this machine's devices, or over devices "
        "that you name: --device foo=24GiB --device foo=24GiB --cpu 64GiB. Only its config, or the "
        "headers of its checkpoint, are read.",
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="an accelerator to plan for; once for each",
    )
    parser.add_argument(
        "--cpu", metavar="SIZE", help="the host's memory; 0 where --device is given"
    )
    parser.add_argument("--disk", metavar="SIZE", help="room on the disk; 0 forbids it")
    parser.add_argument("--dtype", help="such as bfloat16 or int4; by default the config's")
    parser.add_argument("--batch", type=int, default=0, metavar="N", help="sequences at once")
    parser.add_argument(
        "--context", type=int, default=0, metavar="N", help="tokens of each: cache and activations"
    )
    parser.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="plan stages over so many machines, each with these devices",
    )
    parser.add_argument(
        "--link", metavar="RATE", help="between two machines, such as 25GB/s; with --hosts"
    )
    parser.add_argument(
        "--microbatches", type=int, default=1, metavar="N", help="parts of a batch; with --hosts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--explain", action="store_true", help="say why each block went there")
    parser.add_argument(
        "--picture", metavar="FILE", help="draw it: a name that ends in .svg, .png, .html or .txt"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.picture:
        picture_path(args.picture)  # a name of no kind is said before the model is read
    machine = read_machine(args)
    with cache_only_when_unreachable(args.model):
        model, config = read_empty_model(args)
    dtype = args.dtype if args.dtype in ("int4", "int8") else held_dtype(args.dtype, config)
    running = read_running(args, model, config, dtype)
    if args.hosts is not None:
        add_caches(model, running)
        request = _for_hosts(args, machine, running)
        print(plan_hosts(model, config, dtype, request, as_json=args.json))
        return 0
    if args.link is not None:
        raise OptionError("--link is between machines: say how many with --hosts")
    placement, cache = _plan(model, machine, dtype, running, args.disk)
    if args.picture:
        placement.save_picture(args.picture)
    if args.json:
        print(json.dumps(_as_json(args.model, placement, machine, running, cache), indent=2))
        return 0
    print(_table(placement, machine, running, cache))
    if args.explain:
        print(f"\n{placement.explain()}")
    if args.picture:
        print(f"\n{placement.to_text()}\n\npicture: {args.picture}")
    return 0


def _for_hosts(args: argparse.Namespace, machine: Machine, running: Running) -> HostsRequest:
    return HostsRequest(
        args.model,
        args.hosts,
        None if args.link is None else read_link(args.link),
        args.microbatches,
        args.batch,
        args.context,
        machine.budgets,
        running.activations,
        running.cache,
        args.disk is None or read_bytes(args.disk, f"--disk {args.disk}") > 0,
    )


# ---------------------------------------------------------------------- the plan


def _plan(
    model: nn.Module, machine: Machine, dtype: Any, running: Running, disk: str | None
) -> tuple[Placement, dict[str, int]]:
    """The placement, and the bytes of cache on each device.

    The cache of a layer is planned as a buffer of it: it is on the device that runs the layer,
    which for an offloaded layer is the main device, as the planner does with buffers; where the
    main device is too small for that, it is stored with the layer.
    """
    add_caches(model, running)
    options: dict[str, Any] = {} if disk is None else {"disk": read_bytes(disk, f"--disk {disk}")}
    if running.activations and machine.budgets is not None:
        options["headroom"] = {
            key: min(running.activations, int(size))
            for key, size in machine.budgets.items()
            if key != HOST
        }
    asked = PlacementOptions(
        machine.budgets, dtype=dtype, pretended=machine.budgets is not None, **options
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        placement = resolve_device_map(model, "sequential", asked)
    for warning in said:
        print(f"anydevice plan: {warning.message}", file=sys.stderr)
    return placement, _cache_by_device(placement, machine, running)


def _cache_by_device(placement: Placement, machine: Machine, running: Running) -> dict[str, int]:
    found: Counter[str] = Counter()
    for layer in running.layers if running.cache else ():
        key = _device_of(placement, layer)
        main = placement.main_device
        if key in (HOST, _DISK) and main is not None and not placement.offload_buffers:
            key = main
        found[machine.name(key)] += running.cache
    return dict(found)


def _device_of(placement: Mapping[str, Any], name: str) -> Any:
    """The device of a module: its own entry, its parent's, or its first part's."""
    key = covering_name(name, placement)
    if key is not None:
        return placement[key]
    return next((d for n, d in placement.items() if n.startswith(f"{name}.")), HOST)


def _rows(
    placement: Placement, machine: Machine, running: Running, cache: Mapping[str, int]
) -> Sequence[dict[str, Any]]:
    rows = []
    for share in placement.shares.values():
        name = machine.name(share.key)
        kept = cache.get(name, 0)
        accelerator = share.key not in (HOST, _DISK)
        taken_off = running.activations if accelerator and machine.budgets else 0
        rows.append(
            {
                "device": name,
                "budget": None if share.budget is None else share.budget + taken_off,
                "weights": share.used - kept,
                "reserved": share.reserve,
                "cache": kept,
                "activations": running.activations if accelerator else 0,
                "free": share.free,
            }
        )
    return rows


def _table(
    placement: Placement, machine: Machine, running: Running, cache: Mapping[str, int]
) -> str:
    columns = ["device", "budget", "weights", "reserved", "cache", "activations", "free"]
    rows = [
        [str(row["device"])]
        + ["no limit" if row[c] is None else size_text(row[c]) for c in columns[1:]]
        for row in _rows(placement, machine, running, cache)
    ]
    used = [share for share in placement.shares.values() if share.used]
    total = size_text(sum(share.used for share in used) - sum(cache.values()))
    lines = [
        table([c.upper() for c in columns], rows),
        "",
        f"{placement.model}: {total} of weights",
    ]
    if len(used) == 1:
        lines[-1] += f", all on {machine.name(used[0].key)}"
    elif placement.main_device is not None:
        lines[-1] += f"; offloaded blocks run on {machine.name(placement.main_device)}"
    return "\n".join(lines)


def _as_json(
    name: str,
    placement: Placement,
    machine: Machine,
    running: Running,
    cache: Mapping[str, int],
) -> dict[str, Any]:
    main = placement.main_device
    return {
        "model": name,
        "class": placement.model,
        "weights": sum(share.used for share in placement.shares.values()) - sum(cache.values()),
        "devices": _rows(placement, machine, running, cache),
        "device_map": {k: machine.name(v) for k, v in placement.items()},
        "main_device": None if main is None else machine.name(main),
    }


def prepare(words: list[str]) -> list[str]:
    """Accept both spellings of options."""
    return [w.replace("_", "-") if w.startswith("--") and "=" not in w else w for w in words]
