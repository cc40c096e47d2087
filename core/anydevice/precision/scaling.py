"""Loss scaling: what the backend of this process's device gives."""

from __future__ import annotations

from typing import Any

from anydevice.errors import OptionError
from anydevice.processes import PartialState

__all__ = ["get_grad_scaler"]


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
    """Make a loss scaler for this process's device.

    Args:
        distributed_type: taken for the reference's sake: one kind of scaler serves all.
        **kwargs: of ``torch.amp.GradScaler``, such as ``init_scale`` or ``enabled``.

    Raises:
        OptionError: the device has none.

    Example:
        >>> from anydevice.utils import get_grad_scaler
        >>> get_grad_scaler(enabled=False).is_enabled()
        False
    """
    backend = PartialState().device_backend
    if not backend.capabilities.grad_scaling:
        raise OptionError(
            f"the backend for {backend.device_type!r} offers no loss scaler (it does not claim "
            "grad_scaling): train in bfloat16 or float32"
        )
    return backend.new_grad_scaler(**kwargs)
