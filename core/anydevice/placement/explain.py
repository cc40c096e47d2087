"""A placement in words, and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from anydevice.text import format_bytes, lay_out_table

if TYPE_CHECKING:
    from anydevice.placement.result import Placed, Placement, Share

__all__ = ["explain", "table"]


def table(placement: Placement) -> str:
    """The devices, what they hold and what is left, in aligned columns."""
    rows = [("DEVICE", "BLOCKS", "WEIGHTS", "ROOM", "FREE", "BUDGET", "HOLDS")]
    for device, share in placement.shares.items():
        blocks = [p for p in placement.blocks if p.device == device]
        rows.append(
            (
                str(share.key),
                str(len(blocks)),
                format_bytes(share.used),
                format_bytes(share.room),
                "no limit" if share.free is None else format_bytes(share.free),
                "no limit" if share.budget is None else format_bytes(share.budget),
                _span(blocks),
            )
        )
    return lay_out_table(rows, numbers=range(1, len(rows[0]) - 1))


def explain(placement: Placement) -> str:
    """Why each block went where it did: one line a run of blocks with one reason."""
    lines = [_headline(placement)]
    for (device, reason), group in groupby(
        placement.blocks, lambda p: (p.device, _reason(placement, p))
    ):
        blocks = list(group)
        size = format_bytes(sum(p.size for p in blocks))
        lines.append(f"  {placement.shares[device].key}: {_span(blocks)} ({size}): {reason}")
    lines += [f"  {line}" for line in _kept(placement)]
    return "\n".join(lines)


def _headline(placement: Placement) -> str:
    total = format_bytes(sum(share.used for share in placement.shares.values()))
    return f"{placement.model}: {total} in {len(placement.blocks)} blocks"


def _span(blocks: list[Placed]) -> str:
    """The blocks by name: the first and the last."""
    names = [p.name or "the whole model" for p in blocks]
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}" if names else "-"


def _reason(placement: Placement, placed: Placed) -> str:
    if placed.tied_to is not None:
        return f"tied to {placed.tied_to or 'the model'}, so that the weight is there once"
    if not placed.size:
        return "holds nothing; goes with its neighbour"
    share = placement.shares[placed.device]
    if share.budget is None and placed.device not in ("cpu", "disk"):
        return "as the device map says"
    faster = _faster(placement, placed.device)
    if not faster:
        return "the fastest device, filled in execution order"
    if placed.name in placement.host_run:
        return f"larger than any accelerator; runs on {share.key}"
    return "; ".join(_refusal(other, placed) for other in faster)


def _faster(placement: Placement, device: str) -> list[Share]:
    """The devices that come before one."""
    result = []
    for name, share in placement.shares.items():
        if name == device:
            break
        result.append(share)
    return result


def _refusal(share: Share, placed: Placed) -> str:
    """Why a block is not on a faster device."""
    need = format_bytes(placed.size)
    if share.budget is None or share.free is None:
        return f"{share.key} was not given it"
    if placed.size > share.budget:
        return f"{need} is more than {share.key} has ({format_bytes(share.budget)})"
    if placed.size > share.budget - share.room:
        room = format_bytes(share.room)
        return f"{need} does not fit {share.key} beside the {room} that it keeps for visitors"
    if placed.size > share.free:
        return f"{share.key} is full ({format_bytes(share.free)} left)"
    return f"{share.key}'s run of blocks had ended"


def _kept(placement: Placement) -> Iterator[str]:
    """What the room is for."""
    for share in placement.shares.values():
        if not share.room:
            continue
        if share.key != placement.main_device:
            yield f"{share.key} keeps {format_bytes(share.room)} for the largest block on disk"
            continue
        what = "block" if placement.whole else "module"
        count = (
            "two, so that the next is fetched ahead" if placement.ahead == 2 else "one at a time"
        )
        room = format_bytes(share.room)
        yield f"{share.key} runs what rests elsewhere: {room} kept, the largest {what} {count}"
    if placement.main_device is not None and placement.host_run:
        yield f"on the host run {len(placement.host_run)} blocks too large to visit"
