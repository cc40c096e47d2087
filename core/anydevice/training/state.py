"""The state of training: what `PartialState` has, the precision and the engine."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Final

import torch

from anydevice.errors import OptionError
from anydevice.processes import DistributedType, PartialState, PrecisionType

__all__ = ["AcceleratorState", "choose_precision", "is_initialized"]

_DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}


class AcceleratorState:
    """The state that all `Accelerator` objects of a process share.

    Every attribute of `PartialState` is here too.

    Args:
        mixed_precision: "no", "fp16" or "bf16"; None takes the environment's, else "no".
        cpu: use the host.
        dynamo_plugin, deepspeed_plugin, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin,
            parallelism_config: the accelerator's.

    Attributes:
        mixed_precision: "no", "fp16" or "bf16".
        distributed_type: a `DistributedType`.
        device_mesh: the processes as a `DeviceMesh`; None where all do the same.

    Raises:
        OptionError: an unknown precision, one that the device has not, or another than before.

    Example:
        >>> from anydevice import Accelerator, AcceleratorState
        >>> accelerator = Accelerator(cpu=True)
        >>> AcceleratorState().mixed_precision
        'no'
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        mixed_precision: Any = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        partial = PartialState(cpu, **kwargs)
        if not self.initialized:
            self._partial = partial
            self._mixed_precision = choose_precision(mixed_precision, partial)
            self.device_mesh = None
            self.engine_name = "single"
            self.dynamo_plugin = dynamo_plugin
            self.deepspeed_plugin = deepspeed_plugin
            self.fsdp_plugin = fsdp_plugin
            self.torch_tp_plugin = torch_tp_plugin
            self.megatron_lm_plugin = megatron_lm_plugin
            self.parallelism_config = parallelism_config
        elif mixed_precision is not None:
            wanted = choose_precision(mixed_precision, partial)
            if wanted != self._mixed_precision:
                raise OptionError(
                    f"mixed_precision={wanted!r}, but an Accelerator of this process has "
                    f"{self._mixed_precision!r} already: give the same, or make one Accelerator"
                )

    def __reduce__(self) -> Any:
        """Of a copy, and of what another process reads, the state is that process's own."""
        return _this_process, ()

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Clear the state, so that the next instance starts again."""
        cls._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def initialized(self) -> bool:
        """Whether some `AcceleratorState` has been made."""
        return "_partial" in self.__dict__

    @property
    def mixed_precision(self) -> str:
        """The precision in which models compute: "no", "fp16" or "bf16"."""
        return str(self._mixed_precision)

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        special = {
            "fsdp2": DistributedType.FSDP,
            "deepspeed": DistributedType.DEEPSPEED,
            "megatron_lm": DistributedType.MEGATRON_LM,
        }
        kind: DistributedType = special.get(self.engine_name, self._partial.distributed_type)
        return kind

    @property
    def is_fsdp2(self) -> bool:
        """Whether weights are sharded."""
        return self.engine_name == "fsdp2"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_partial":
            raise AttributeError(f"AcceleratorState has no attribute {name!r}")
        partial = self.__dict__.get("_partial")
        if partial is None:
            raise AttributeError(
                f"AcceleratorState has no {name!r} yet: make an Accelerator() or a PartialState()"
            )
        return getattr(partial, name)

    def __repr__(self) -> str:
        return f"{self._partial!r}\nMixed precision type: {self.mixed_precision}\n"


def is_initialized() -> bool:
    """Whether an `Accelerator`, or its state, has been made in this process.

    Example:
        >>> from anydevice import AcceleratorState
        >>> from anydevice.state import is_initialized
        >>> AcceleratorState._reset_state()
        >>> is_initialized()
        False
    """
    return "_partial" in AcceleratorState._shared_state


def choose_precision(given: Any, state: PartialState) -> str:
    """The precision that was asked for, by argument or environment, if the device has it.

    Raises:
        OptionError: it is unknown, or the device has it not.
    """
    if given is None:
        given = os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    name = str(getattr(given, "value", given)).lower()
    if name == "fp8":
        raise OptionError(
            "mixed_precision='fp8' is not there: convert the model with torchao "
            "(torchao.float8.convert_to_float8_training) and give 'bf16'"
        )
    if name not in ("no", *_DTYPES):
        known = ", ".join(p.value for p in PrecisionType if p.value != "fp8")
        raise OptionError(f"mixed_precision={given!r}: give one of {known}")
    dtype = _DTYPES.get(name)
    if dtype is not None and dtype not in state.device_backend.autocast_dtypes():
        can = [n for n, d in _DTYPES.items() if d in state.device_backend.autocast_dtypes()]
        raise OptionError(
            f"mixed_precision={name!r}: {state.device} cannot compute in it; it can in "
            f"{', '.join(['no', *can])}"
        )
    return name


def _this_process() -> AcceleratorState:
    made = object.__new__(AcceleratorState)
    made.__dict__ = AcceleratorState._shared_state
    return made
