"""What each answer of a member must be, whenever it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from anydevice_conformance.layouts import is_dense
from anydevice_conformance.subject import Subject

__all__ = ["changed_declaration", "wrong_answer"]


def changed_declaration(subject: Subject) -> str:
    """What the backend no longer declares as it did (DEV-002); empty when all is as it was."""
    for member, value in subject.declared.items():
        now: Any = getattr(subject.backend, member, None)
        if now != value:
            return f"{member} was {value!r}, and is {now!r}"
    return ""


def wrong_answer(
    subject: Subject, name: str, answer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """What is wrong with the answer of a member to these arguments; empty when nothing is."""
    if name == "move":
        return _wrong_move(subject, answer, *args, **kwargs)
    if name == "pin_memory":
        return _wrong_copy(answer, *args, **kwargs)
    right = _ANSWERS.get(name)
    return "" if right is None or right(answer) else f"it returned {answer!r}"


def _is_size(answer: Any) -> bool:
    return type(answer) is int and answer >= 0


def _is_info(answer: Any) -> bool:
    return _is_size(answer.free) and _is_size(answer.total) and answer.free <= answer.total


def _is_state(answer: Any) -> bool:
    is_tensor = isinstance(answer, torch.Tensor)
    return is_tensor and answer.dtype == torch.uint8 and answer.device.type == "cpu"


_ANSWERS: Final[dict[str, Callable[[Any], bool]]] = {
    "is_available": lambda answer: type(answer) is bool,
    "device_count": _is_size,
    "why_unavailable": lambda answer: isinstance(answer, str),
    "device_name": lambda answer: isinstance(answer, str) and answer != "",
    "driver_version": lambda answer: isinstance(answer, str),
    "memory_info": _is_info,
    "memory_allocated": _is_size,
    "peak_memory_allocated": _is_size,
    "is_out_of_memory": lambda answer: type(answer) is bool,
    "supports_dtype": lambda answer: type(answer) is bool,
    "rng_state": _is_state,
    "autocast_dtypes": lambda answer: isinstance(answer, frozenset),
    "current_device": lambda answer: answer is None or _is_size(answer),
    "local_device": _is_size,
    "numa_node": lambda answer: answer is None or type(answer) is int,
    "process_environment": lambda answer: isinstance(answer, Mapping),
}


def _wrong_move(
    subject: Subject,
    answer: Any,
    tensor: torch.Tensor,
    device: torch.device,
    *,
    non_blocking: bool = False,
) -> str:
    """What every move keeps: place, shape, dtype, strides, flags (MOV-004, 007, 011, 025)."""
    wrong = _wrong_copy(answer, tensor)
    if wrong or answer is tensor:
        return wrong
    asked = torch.device(device)
    if asked.type == subject.type and not subject.is_on(answer, asked.index or 0):
        return f"a tensor moved to {asked} is on {answer.device}"
    if torch.is_grad_enabled() and answer.requires_grad != tensor.requires_grad:
        return f"requires_grad was {tensor.requires_grad}, and is {answer.requires_grad}"
    if subject.infers and answer.is_inference() != torch.is_inference_mode_enabled():
        return f"is_inference() of the result is {answer.is_inference()}"
    laid_out = tensor.layout == answer.layout == torch.strided and tensor.numel() > 1
    if subject.strided and laid_out and is_dense(tensor):
        steps = _steps(tensor)
        if steps != _steps(answer):
            return f"strides {tensor.stride()} of shape {tuple(tensor.shape)}: {answer.stride()}"
    return ""


def _wrong_copy(answer: Any, tensor: torch.Tensor) -> str:
    if not isinstance(answer, torch.Tensor):
        return f"it returned {answer!r}"
    if answer.shape != tensor.shape or answer.dtype != tensor.dtype:
        kept = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        return f"{kept} became {answer.dtype} of shape {tuple(answer.shape)}"
    return ""


def _steps(tensor: torch.Tensor) -> list[int]:
    """The strides that mean something: of what has more than one element in that dimension."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
