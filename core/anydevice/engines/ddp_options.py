"""What a user can choose about data parallelism."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from anydevice.arguments import names_unknown_arguments
from anydevice.errors import OptionError
from anydevice.handlers import KwargsHandler
from anydevice.processes import DDPCommunicationHookType

__all__ = ["DistributedDataParallelKwargs"]

_NO = DDPCommunicationHookType.NO


@names_unknown_arguments
@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, and its communication hook.

    Args:
        dim, broadcast_buffers, bucket_cap_mb, find_unused_parameters, check_reduction,
            gradient_as_bucket_view, static_graph: as torch has them.
        comm_hook: how gradients travel: ``"no"``, ``"fp16"``, ``"bf16"``, ``"power_sgd"`` or
            ``"batched_power_sgd"``.
        comm_wrapper: ``"fp16"`` or ``"bf16"`` around a PowerSGD hook.
        comm_state_option: arguments of torch's `PowerSGDState`.

    Example:
        >>> from anydevice import DistributedDataParallelKwargs
        >>> handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        >>> handler.to_kwargs()
        {'find_unused_parameters': True}
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = _NO
    comm_wrapper: DDPCommunicationHookType = _NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        self.comm_wrapper = DDPCommunicationHookType(self.comm_wrapper)
        power = "power_sgd" in self.comm_hook.value
        if self.comm_wrapper.value not in ("no", "fp16", "bf16"):
            raise OptionError(
                f"comm_wrapper={self.comm_wrapper.value!r}: give 'no', 'fp16' or 'bf16'"
            )
        if self.comm_wrapper is not _NO and self.comm_hook is _NO:
            raise OptionError("comm_wrapper wraps a communication hook: give comm_hook too")
        if self.comm_state_option and not power:
            raise OptionError("comm_state_option is PowerSGD's: give comm_hook='power_sgd' too")

    def for_torch(self) -> dict[str, Any]:
        """The arguments that `DistributedDataParallel` takes, those that differ from its own."""
        own = {f.name for f in dataclasses.fields(self) if not f.name.startswith("comm_")}
        return {key: value for key, value in self.to_kwargs().items() if key in own}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Give a model its communication hook."""
        if self.comm_hook is _NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[str, Any] = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "power_sgd": powerSGD_hook.powerSGD_hook,
            "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers: dict[str, Any] = {
            "fp16": default_hooks.fp16_compress_wrapper,
            "bf16": default_hooks.bf16_compress_wrapper,
        }
        hook = hooks[self.comm_hook.value]
        state: Any = None
        if "power_sgd" in self.comm_hook.value:
            state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option)
        if self.comm_wrapper is not _NO:
            hook = wrappers[self.comm_wrapper.value](hook)

        # torch lets its own bf16 hook run with two vendors' collectives only, by the hook's name;
        # others that cannot do it say so at the first step.
        def exchange(state: Any, bucket: Any) -> Any:
            return hook(state, bucket)

        exchange.__annotations__ = {
            "bucket": torch.distributed.GradBucket,  # type: ignore[attr-defined]
            "return": torch.futures.Future[torch.Tensor],
        }
        model.register_comm_hook(state, exchange)
