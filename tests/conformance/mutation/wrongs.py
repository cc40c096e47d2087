"""Ways to be wrong: what a fault does in place of, before or after the right call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from mutation.triggers import Call

__all__ = ["EFFECTS", "MOVES", "Right"]

#: The right member, with its arguments bound.
Right = Callable[[], Any]
_kept: list[Any] = []


def _changed(change: Callable[[torch.Tensor], None]) -> Callable[[Call, Right], Any]:
    def wrong(call: Call, right: Right) -> Any:
        moved = right()
        if moved.numel() == 0 or moved is call.tensor:
            return moved
        with torch.inference_mode(moved.is_inference()), torch.no_grad():
            copy = moved.detach().clone(memory_format=torch.preserve_format)
            change(copy)
        if isinstance(moved, torch.nn.Parameter):
            return torch.nn.Parameter(copy, moved.requires_grad)
        if moved.requires_grad and not moved.is_leaf:
            # the graph stays as it was
            with torch.no_grad():
                moved.copy_(copy)
            return moved
        return copy.requires_grad_(moved.requires_grad) if moved.requires_grad else copy

    return wrong


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8) if tensor.is_contiguous() else tensor


def _last_is_lost(tensor: torch.Tensor) -> None:
    tensor[(-1,) * tensor.dim()] = 0


def _first_is_lost(tensor: torch.Tensor) -> None:
    tensor[(0,) * tensor.dim()] = 0


def _tail_is_lost(tensor: torch.Tensor) -> None:
    if tensor.dim():
        tensor[tensor.shape[0] // 2 :] = 0
    else:
        tensor.zero_()


def _bit_flips(tensor: torch.Tensor) -> None:
    _bytes(tensor.resolve_conj().resolve_neg())[-1:] ^= 1 if tensor.is_contiguous() else 0


def _loses_graph(call: Call, right: Right) -> Any:
    moved = right()
    return moved.detach() if moved is not call.tensor else moved


def _gains_grad(call: Call, right: Right) -> Any:
    moved = right()
    if moved.is_floating_point() and moved is not call.tensor and not moved.is_inference():
        return moved.detach().requires_grad_()
    return moved


def _loses_strides(call: Call, right: Right) -> Any:
    moved = right()
    return moved.contiguous() if moved is not call.tensor else moved


def _through_half(call: Call, right: Right) -> Any:
    moved = right()
    narrower = {
        torch.float64: torch.float32,
        torch.float32: torch.bfloat16,
        torch.int64: torch.int32,
        torch.complex128: torch.complex64,
        torch.int32: torch.float32,
    }
    if moved.dtype not in narrower or moved is call.tensor:
        return moved
    return moved.to(narrower[moved.dtype]).to(moved.dtype)


def _changes_source(call: Call, right: Right) -> Any:
    moved = right()
    source = call.tensor
    if source.numel() and moved is not source and not source.is_inference():
        with torch.no_grad():
            call.backend.synchronize(call.index or 0)
            source.detach()[(0,) * source.dim()] = 0
    return moved


def _writes_beyond(call: Call, right: Right) -> Any:
    moved = right()
    source = call.tensor
    whole = source.untyped_storage().nbytes() // source.itemsize
    steps = zip(source.shape, source.stride(), strict=True)
    end = source.storage_offset() + sum((size - 1) * step for size, step in steps) + 1
    if source.numel() and end < whole and not source.is_inference():
        call.backend.synchronize(call.index or 0)
        with torch.no_grad():
            torch.as_strided(source.detach(), (1,), (1,), end).zero_()
    return moved


def _unordered(call: Call, right: Right) -> Any:
    here, there = call.tensor.device, call.device
    mine = here if here.type == call.backend.device_type else there
    if call.tensor.numel() == 0 or mine.type == "cpu":
        return right()
    with torch.Stream(device=torch.device(mine.type, mine.index or 0)):
        return right()


def _wrong_place(call: Call, right: Right) -> Any:
    moved = right()
    if moved.device.type == "cpu" or call.backend.device_count() < 2:
        return moved
    return moved.to(torch.device(moved.device.type, 1 - moved.device.index))


def _shares(call: Call, right: Right) -> Any:
    """A result is handed out twice for one source."""
    cache = vars(call.backend).setdefault("_shared", {})
    source = call.tensor
    if not call.moves or source.numel() == 0:
        return right()
    key = (source.data_ptr(), source.shape, source.stride(), source.dtype, call.device)
    if key not in cache:
        cache.clear()
        cache[key] = (right(), source)
    return cache[key][0]


def _keeps(call: Call, right: Right) -> Any:
    moved = right()
    _kept.append(moved)
    return moved


def _keeps_source(call: Call, right: Right) -> Any:
    _kept.append(call.tensor)
    return right()


def _copies_in_place(call: Call, right: Right) -> Any:
    """A tensor that is there already is copied."""
    moved = right()
    return moved.clone() if moved is call.tensor else moved


#: Wrong in `move` and `pin_memory`.
MOVES: Final[dict[str, Callable[[Call, Right], Any]]] = {
    "the last element is lost": _changed(_last_is_lost),
    "the first element is lost": _changed(_first_is_lost),
    "the second half is lost": _changed(_tail_is_lost),
    "a bit flips": _changed(_bit_flips),
    "the graph is lost": _loses_graph,
    "a gradient is asked for": _gains_grad,
    "the strides are lost": _loses_strides,
    "digits are lost": _through_half,
    "the source changes": _changes_source,
    "the source's neighbour changes": _writes_beyond,
    "the copy is not ordered": _unordered,
    "the result is elsewhere": _wrong_place,
    "one result serves two calls": _shares,
    "the result is kept": _keeps,
    "the source is kept": _keeps_source,
    "what is there is copied": _copies_in_place,
}


# ---------------------------------------------------------------------- on the side


def _raises(call: Call, right: Right) -> Any:
    raise RuntimeError("the driver says no (error 719)")


def _sets_device(call: Call, right: Right) -> Any:
    found = right()
    count = call.backend.module.device_count()
    call.backend.module.set_device((call.backend.module.current_device() + 1) % count)
    return found


def _sets_stream(call: Call, right: Right) -> Any:
    found = right()
    module = call.backend.module
    module.set_stream(torch.Stream(device=torch.device(call.backend.device_type, call.index or 0)))
    return found


def _stops_device(call: Call, right: Right) -> Any:
    for index in range(call.backend.module.device_count()):
        call.backend.module.synchronize(index)
    return right()


def _sets_grad_mode(call: Call, right: Right) -> Any:
    found = right()
    torch.set_grad_enabled(not torch.is_grad_enabled())
    return found


def _sets_dtype(call: Call, right: Right) -> Any:
    found = right()
    torch.set_default_dtype(torch.float64)
    return found


def _sets_default_device(call: Call, right: Right) -> Any:
    found = right()
    torch.set_default_device(call.backend.device_type)
    return found


def _sets_threads(call: Call, right: Right) -> Any:
    found = right()
    torch.set_num_threads(3)
    return found


def _leaks_descriptor(call: Call, right: Right) -> Any:
    os.open(os.devnull, os.O_RDONLY)
    return right()


def _leaks_thread(call: Call, right: Right) -> Any:
    if threading.active_count() < 300:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return right()


def _leaks_host(call: Call, right: Right) -> Any:
    _kept.append(bytearray(os.urandom(64)) * 1024)
    return right()


def _leaks_device(call: Call, right: Right) -> Any:
    found = right()
    device = torch.device(call.backend.device_type, call.index or 0)
    _kept.append(torch.zeros(2048, dtype=torch.uint8, device=device))
    return found


def _leaks_pinned(call: Call, right: Right) -> Any:
    _kept.append(torch.zeros(2048, dtype=torch.uint8).pin_memory())
    return right()


def _moves_host_generator(call: Call, right: Right) -> Any:
    torch.rand(1)
    return right()


#: Wrong in any member: what it does besides its work.
EFFECTS: Final[dict[str, Callable[[Call, Right], Any]]] = {
    "it raises": _raises,
    "the current device changes": _sets_device,
    "the current stream changes": _sets_stream,
    "the devices are waited for": _stops_device,
    "the gradient mode changes": _sets_grad_mode,
    "the default dtype changes": _sets_dtype,
    "the default device changes": _sets_default_device,
    "the number of threads changes": _sets_threads,
    "a descriptor is left": _leaks_descriptor,
    "a thread is left": _leaks_thread,
    "host memory is left": _leaks_host,
    "device memory is left": _leaks_device,
    "pinned memory is left": _leaks_pinned,
    "the host's generator moves": _moves_host_generator,
}
