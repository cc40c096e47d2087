"""The tensors of a training: their dtypes, moving means of them, and copies on the host."""

from __future__ import annotations

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from anydevice_conformance.trainings import Part, Training

__all__ = ["average", "dtype_of", "kept"]


def average(means: list[torch.Tensor], parameters: list[torch.nn.Parameter]) -> None:
    """Take parameters into their moving means, in lists of one dtype and device each."""
    lists: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for mean, parameter in zip(means, parameters, strict=True):
        one, other = lists.setdefault(f"{mean.dtype} {mean.device}", ([], []))
        one.append(mean)
        other.append(parameter.detach())
    for one, other in lists.values():
        get_ema_multi_avg_fn(0.75)(one, other, None)  # type: ignore[no-untyped-call]


def dtype_of(part: Part, training: Training, number: int) -> torch.dtype:
    """The dtype of a parameter of a part."""
    # Torch's own fused SGD of more elements of bfloat16 is wrong on the host, whose code some use.
    wrong = (part.optimizer, part.form) == ("SGD", "fused")
    if (
        part.mixed
        and number % 7 in (0, 3)
        and not (wrong and torch.Size(part.shapes[number]).numel() > 8)
    ):
        return torch.bfloat16
    return torch.float64 if training.wide and number % 5 == 2 else torch.float32


def kept(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the host: small ones of a dtype and device are fetched as one."""
    queues: dict[str, list[str]] = {}
    for name, tensor in found.items():
        queues.setdefault(f"{tensor.dtype} {tensor.device}", []).append(name)
    fetched: dict[str, torch.Tensor] = {}
    for names in queues.values():
        whole = torch.cat([found[name].reshape(-1) for name in names]).cpu()
        parts = torch.split(whole, [found[name].numel() for name in names])
        fetched |= {
            name: part.view(found[name].shape) for name, part in zip(names, parts, strict=True)
        }
    return fetched
