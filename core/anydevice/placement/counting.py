"""Bytes of blocks on their devices, and what offloaded blocks need where they run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from anydevice.devices import CPU, DISK, parse_device
from anydevice.placement.placed import Facts, Placed

__all__ = ["bytes_by_device", "needed_reserve"]

_OFFLOADED = (CPU.type, DISK.type)


def bytes_by_device(
    blocks: Iterable[Placed], sizes: Sequence[int], main: str | None, offload_buffers: bool
) -> dict[str, int]:
    """Bytes that are stored on each device; a tied weight counts once on each that has it.

    Offloaded blocks run on ``main``; None is the host. Their buffers are there, unless
    ``offload_buffers`` says that they are stored with their parameters.
    """
    held: defaultdict[str, set[int]] = defaultdict(set)
    executing = main or CPU.type
    offloaded = _OFFLOADED if main is not None else (DISK.type,)
    for block in blocks:
        held[block.device].update(block.parameters)
        stays = block.device in offloaded and not offload_buffers
        if block.buffers:
            held[executing if stays else block.device].update(block.buffers)
    return {device: sum(sizes[t] for t in tensors) for device, tensors in held.items()}


def needed_reserve(
    blocks: Sequence[Placed],
    host_run: Collection[str],
    facts: Facts,
    keys: Mapping[str, int | str],
) -> tuple[str | None, int, int]:
    """What a changed placement needs to run its offloaded blocks.

    Returns:
        The canonical name of the executing device, the bytes reserved there, and for how many
        blocks; ``(None, 0, 0)`` where nothing runs on another device than it is stored on.
    """
    offloaded = [p for p in blocks if p.device in _OFFLOADED and p.name not in host_run and p.size]
    main = next((name for name, key in keys.items() if key == facts.main_device), None)
    if main is None or main in _OFFLOADED:
        resident = (p.device for p in blocks if p.device not in _OFFLOADED)
        main = next((d for d in resident if parse_device(d).is_accelerator), None)
    if not offloaded or main is None:
        return None, 0, 0
    if facts.is_given:
        return main, 0, 0
    ahead = facts.ahead or 1
    return main, ahead * max(p.onload for p in offloaded), ahead
