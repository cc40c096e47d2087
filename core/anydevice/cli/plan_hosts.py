"""``anydevice plan --hosts``: a model's stages over machines that need not be here."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from anydevice.cli.text import size_text, table
from anydevice.devices import CPU, parse_device
from anydevice.distributed import Stage
from anydevice.distributed.chain import find_chain
from anydevice.distributed.stages import Memory, plan_stages
from anydevice.errors import BudgetError, ModelError, OptionError
from anydevice.placement import get_max_memory

__all__ = ["HostsRequest", "plan_hosts", "read_link"]

_LINK: Final = re.compile(r"^\s*([\d.]+)\s*([kKmMgGtT]?)(i?)(B|b|bit)/s\s*$")
_PREFIXES: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
#: How each figure is computed; printed with them.
FORMULAS: Final = {
    "link_time_per_token": "(hosts - 1) * batch * hidden_size * bytes_per_number / link",
    "link_time_of_prefill": (
        "(hosts - 1) * batch * context * hidden_size * bytes_per_number / link"
    ),
    "logits_time_per_token": "batch * vocabulary * bytes_per_number / link",
    "bubble": "(hosts - 1) / (microbatches + hosts - 1)",
    "bubble_of_generation": "(hosts - 1) / hosts",
}


@dataclasses.dataclass(frozen=True)
class HostsRequest:
    """What to plan for.

    Attributes:
        name: of the model, for messages.
        hosts: how many machines; each runs one process.
        link: bytes a second between two of them; None where it is not asked for.
        microbatches: into which a batch is divided where no cache is used.
        batch: sequences at once.
        context: tokens of each.
        budgets: of the devices of each host, by the planner's keys; None for those of this machine.
        activations: bytes that a forward needs on each device beside weights and cache.
        cache: bytes of keys and values of one layer.
        disk: whether weights may be stored on the disks.
    """

    name: str
    hosts: int
    link: float | None
    microbatches: int
    batch: int
    context: int
    budgets: Mapping[Any, int | str] | None
    activations: int
    cache: int
    disk: bool


def read_link(text: str) -> float:
    """Bytes a second, of words such as ``25GB/s``, ``10GiB/s`` or ``200Gb/s`` (bits).

    Raises:
        BudgetError: they cannot be read.
    """
    found = _LINK.match(text)
    if not found or not float(found[1]):
        raise BudgetError(f"--link {text!r}: write such as 25GB/s, or 200Gb/s for bits")
    number, prefix, binary, unit = found.groups()
    rate = float(number) * float(1024 if binary else 1000) ** _PREFIXES[prefix.lower()]
    return rate if unit == "B" else rate / 8


def plan_hosts(
    model: nn.Module, config: Any, dtype: Any, request: HostsRequest, *, as_json: bool
) -> str:
    """The plan, as tables or JSON.

    Args:
        model: on meta, with the caches of its layers as buffers.
        config: of transformers.
        dtype: that weights are held in; None for their own.
        request: what to plan for.
        as_json: rather than tables.

    Raises:
        OptionError: an option is out of range, or there are more hosts than blocks.
        ModelError: the model cannot be cut, or cannot be run without its weights.
        DoesNotFitError: the hosts are too small.
    """
    if config is None:
        raise ModelError(
            f"{request.name}: --hosts needs a config.json: it says in what order modules run"
        )
    for name in ("hosts", "microbatches"):
        if getattr(request, name) < 1:
            raise OptionError(f"--{name} {getattr(request, name)}: give a number from 1 up")
    if isinstance(dtype, str):
        raise OptionError(f"--dtype {dtype} with --hosts: give a dtype of torch, such as bfloat16")
    if dtype is not None:
        model.to(dtype)
    chain = find_chain(model.eval(), None)
    memory = _memory(request)
    stages = plan_stages(chain, [memory] * request.hosts)
    rows = [_row(stage, chain.blocks, memory, request) for stage in stages]
    figures = _figures(config, dtype or next(model.parameters()).dtype, request)
    if as_json:
        return json.dumps(
            {
                "model": request.name,
                "class": type(model).__name__,
                "hosts": rows,
                **figures,
                "formulas": {name: FORMULAS[name] for name in figures if name in FORMULAS},
            },
            indent=2,
        )
    return _tables(rows, figures, type(model).__name__, request)


def _memory(request: HostsRequest) -> Memory:
    budgets = get_max_memory(None if request.budgets is None else dict(request.budgets))
    devices = [size for key, size in budgets.items() if parse_device(key).is_accelerator]
    device = sum(max(0, size - request.activations) for size in devices)
    host = sum(size for key, size in budgets.items() if parse_device(key) == CPU)
    if not device:
        device, host = host, 0
    return Memory(device, host, request.disk, {})


def _row(
    stage: Stage, blocks: Sequence[str], memory: Memory, request: HostsRequest
) -> dict[str, Any]:
    count = stage.stop - stage.start
    return {
        "host": stage.rank,
        "first": blocks[stage.start],
        "last": blocks[stage.stop - 1],
        "blocks": count,
        "weights": stage.nbytes - count * request.cache,
        "cache": count * request.cache,
        "devices": memory.device,
        "offloaded": max(0, stage.nbytes - memory.device),
    }


def _figures(config: Any, dtype: torch.dtype, request: HostsRequest) -> dict[str, Any]:
    """Times in seconds, and the part of the time that a host waits for the others."""
    hosts, batch = request.hosts, max(request.batch, 1)
    found: dict[str, Any] = {
        "microbatches": request.microbatches,
        "bubble": (hosts - 1) / (request.microbatches + hosts - 1),
        "bubble_of_generation": (hosts - 1) / hosts,
    }
    text = getattr(config, "text_config", None) or config
    width, vocabulary = getattr(text, "hidden_size", None), getattr(text, "vocab_size", None)
    if request.link is None or not width:
        return found
    token = (hosts - 1) * batch * width * dtype.itemsize / request.link
    found["link"] = request.link
    found["link_time_per_token"] = token
    found["link_time_of_prefill"] = token * max(request.context, 1)
    if vocabulary:
        found["logits_time_per_token"] = batch * vocabulary * dtype.itemsize / request.link
    return found


def _tables(
    rows: Sequence[Mapping[str, Any]], figures: Mapping[str, Any], kind: str, request: HostsRequest
) -> str:
    cells = [
        [
            str(row["host"]),
            f"{row['first']} to {row['last'].rpartition('.')[2]}",
            *(size_text(row[name]) for name in ("weights", "cache", "devices", "offloaded")),
        ]
        for row in rows
    ]
    lines = [
        table(["HOST", "BLOCKS", "WEIGHTS", "CACHE", "DEVICES", "OFFLOADED"], cells),
        "",
        f"{kind}: {size_text(sum(row['weights'] for row in rows))} of weights over "
        f"{request.hosts} hosts, batch {max(request.batch, 1)}, context {max(request.context, 1)}",
        "",
    ]
    shown = [
        [name.replace("_", " "), _value(name, figures[name]), formula]
        for name, formula in FORMULAS.items()
        if name in figures
    ]
    lines.append(table(["FIGURE", "VALUE", "FORMULA"], shown))
    lines.append("\nTimes leave out the latency of the link, and computation.")
    return "\n".join(lines)


def _value(name: str, value: float) -> str:
    """A figure for a person: a part of the time, or seconds."""
    if name.startswith("bubble"):
        return f"{value:.0%}"
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if value >= s), ("us", 1e-6))
    return f"{value / size:.3g} {unit}"
