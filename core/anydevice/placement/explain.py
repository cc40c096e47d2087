"""A placement in words, and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from anydevice.placement.placed import Facts, Placed, Share
from anydevice.text import format_bytes, lay_out_table

__all__ = ["explain", "table"]


def table(facts: Facts) -> str:
    """Return the devices, what they hold and what is left, in aligned columns."""
    rows = [("DEVICE", "BLOCKS", "WEIGHTS", "RESERVED", "FREE", "BUDGET", "HOLDS")]
    for device, share in facts.shares.items():
        blocks = [p for p in facts.blocks if p.device == device]
        rows.append(
            (
                str(share.key),
                str(len(blocks)),
                format_bytes(share.used),
                format_bytes(share.reserve),
                "no limit" if share.free is None else format_bytes(share.free),
                "no limit" if share.budget is None else format_bytes(share.budget),
                _span(blocks),
            )
        )
    return lay_out_table(rows, numbers=range(1, len(rows[0]) - 1))


def explain(facts: Facts) -> str:
    """Say why each block is where it is: one line for each run of blocks with one reason."""
    total = format_bytes(sum(share.used for share in facts.shares.values()))
    lines = [f"{facts.model}: {total} in {len(facts.blocks)} blocks"]
    for (device, reason), group in groupby(facts.blocks, lambda p: (p.device, _reason(facts, p))):
        blocks = list(group)
        size = format_bytes(sum(p.size for p in blocks))
        lines.append(f"  {facts.shares[device].key}: {_span(blocks)} ({size}): {reason}")
    lines += [f"  {line}" for line in _kept(facts)]
    return "\n".join(lines)


def _span(blocks: list[Placed]) -> str:
    """The blocks by name: the first and the last."""
    names = [p.name or "the whole model" for p in blocks]
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}" if names else "-"


def _reason(facts: Facts, placed: Placed) -> str:
    if placed.tied_to is not None:
        return f"tied to {placed.tied_to or 'the model'}: the shared weight is stored once"
    if not placed.size:
        return "has no weights; goes with its neighbour"
    share = facts.shares[placed.device]
    if placed.is_given or (share.budget is None and placed.device not in ("cpu", "disk")):
        return "as the device map says"
    names = list(facts.shares)
    faster = [facts.shares[name] for name in names[: names.index(placed.device)]]
    if not faster:
        return "the fastest device, filled in execution order"
    if placed.name in facts.host_run:
        return f"larger than any accelerator; runs on {share.key}"
    return "; ".join(_refusal(other, placed) for other in faster)


def _refusal(share: Share, placed: Placed) -> str:
    """Why a block is not on a faster device."""
    need = format_bytes(placed.size)
    if share.budget is None or share.free is None:
        return f"{share.key} is not given it"
    if placed.size > share.budget:
        return f"{need} is more than {share.key} has ({format_bytes(share.budget)})"
    if placed.size > share.budget - share.reserve:
        reserve = format_bytes(share.reserve)
        return f"{need} does not fit {share.key}: {reserve} are reserved for offloaded blocks"
    if placed.size > share.free:
        return f"{share.key} has {format_bytes(share.free)} left of {format_bytes(share.budget)}"
    return f"{share.key}'s run of blocks had ended"


def _kept(facts: Facts) -> Iterator[str]:
    """What the reserves are for."""
    for share in facts.shares.values():
        if not share.reserve:
            continue
        reserve = format_bytes(share.reserve)
        if share.key != facts.main_device:
            yield f"{share.key} reserves {reserve} for the largest block on disk"
            continue
        what = "block" if facts.whole else "module"
        count = "two, to prefetch the next one" if facts.ahead == 2 else "one at a time"
        yield f"{share.key} runs offloaded blocks: {reserve} reserved, the largest {what}, {count}"
    if facts.main_device is not None and facts.host_run:
        yield f"{len(facts.host_run)} blocks too large for any accelerator run on the host"
