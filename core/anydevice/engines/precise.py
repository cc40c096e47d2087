"""The precision in which a model computes, put around it: the module itself is not touched."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from anydevice.nested import map_tensors

__all__ = ["Autocast", "MixedPrecision"]

_LOW = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Autocast:
    """A precision, as `torch.autocast` takes it.

    Attributes:
        device_type: of the device that computes.
        dtype: the low precision; None computes in the weights' own.
        enabled: False turns it off.
        cache_enabled: keep weights that were converted, within one region; None is torch's choice.

    Example:
        >>> import torch
        >>> from anydevice.engines import Autocast
        >>> Autocast("cpu", torch.bfloat16).dtype
        torch.bfloat16
    """

    device_type: str
    dtype: torch.dtype | None = None
    enabled: bool = True
    cache_enabled: bool | None = None

    @property
    def active(self) -> bool:
        """Whether it changes anything."""
        return self.enabled and self.dtype is not None

    def region(self) -> Any:
        """A context that computes in this precision."""
        return torch.autocast(
            self.device_type,
            dtype=self.dtype,
            enabled=self.active,
            cache_enabled=self.cache_enabled,
        )


class MixedPrecision(nn.Module):
    """A model that computes in low precision and gives its results in float32.

    The model stands in ``module``, as within `DistributedDataParallel`; its other attributes are
    reached through this one, and its state has the plain model's keys.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice.engines import Autocast, MixedPrecision
        >>> model = MixedPrecision(nn.Linear(2, 2), Autocast("cpu", torch.bfloat16))
        >>> model(torch.ones(1, 2)).dtype, model.in_features, sorted(model.state_dict())
        (torch.float32, 2, ['bias', 'weight'])
    """

    #: Told to `anydevice.utils.extract_model_from_parallel`, which takes the model out.
    is_precision_wrapper = True

    def __init__(self, module: nn.Module, autocast: Autocast) -> None:
        super().__init__()
        self.module = module
        self.autocast = autocast
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward in low precision."""
        with self.autocast.region():
            output = self.module(*args, **kwargs)
        return map_tensors(_to_float32, output)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain model's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain model's."""
        return self.module.load_state_dict(*args, **kwargs)


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor
