"""The enums of the reference. Members that name a device or a compiler are made when asked for.

Which devices there are is the backends' knowledge, so no list of them stands here: a device type
``foo`` gives ``DistributedType.MULTI_FOO`` and ``RNGType.FOO``.
"""

from __future__ import annotations

import enum
import re
from typing import Any

import torch

from anydevice import registry

__all__ = [
    "ComputeEnvironment",
    "DDPCommunicationHookType",
    "DistributedType",
    "DynamoBackend",
    "LoggerType",
    "PrecisionType",
    "RNGType",
    "SageMakerDistributedType",
]


class _OpenMeta(enum.EnumMeta):
    """Asks the class for members that do not stand in it."""

    def __getattr__(cls, name: str) -> Any:
        if not name.startswith("_") and name.isupper():
            made = cls._open(name)
            if made is not None:
                return made
        raise AttributeError(f"{cls.__name__} has no member {name!r}")

    def __contains__(cls, value: object) -> bool:
        try:
            cls(value)  # a member is a value of itself
        except ValueError:
            return False
        return True


class _Words(str, enum.Enum, metaclass=_OpenMeta):
    """An enum of strings that equal their values, and that print as them."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """The values of all members that stand in the class."""
        return [member.value for member in cls]

    @classmethod
    def _open(cls, name: str) -> Any:
        """A member for a name that does not stand in the class; None where there is none."""
        return None

    @classmethod
    def _made(cls, name: str, value: str) -> Any:
        found = cls._value2member_map_.get(value)
        if found is None:
            found = str.__new__(cls, value)
            found._name_, found._value_ = name, value
            found = cls._value2member_map_.setdefault(value, found)
        return found

    @classmethod
    def _missing_(cls, value: object) -> Any:
        """A member by its value, in any case, and where it is one to be made."""
        text = str(value)
        for member in cls:
            if member.value.lower() == text.lower():
                return member
        return cls._open(text.upper())


class DistributedType(_Words):
    """How the processes work together.

    ``MULTI_FOO`` is several processes on devices of type ``foo``; `DeviceBackend.kind` may say
    another word, as in ``MULTI_GPU``. A script may ask for hardware that is not installed here, so
    any upper-case name of one word is a member, too; nothing equals it.

    Example:
        >>> from anydevice import DistributedType
        >>> from anydevice import PartialState
        >>> PartialState().distributed_type == DistributedType.NO
        True
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"

    @classmethod
    def _open(cls, name: str) -> Any:
        return cls._made(name, name) if re.fullmatch(r"(MULTI_)?[A-Z0-9]+", name) else None

    @classmethod
    def of_device(cls, device_type: str) -> DistributedType:
        """Several processes on devices of a type."""
        word = registry.get_backend(device_type).kind or device_type
        made: DistributedType = cls(f"MULTI_{word.upper()}")
        return made


class RNGType(_Words):
    """A random generator: torch's on the host, one of your own, or those of a device type.

    Example:
        >>> from anydevice.utils import RNGType
        >>> RNGType("torch") is RNGType.TORCH
        True
    """

    TORCH = "torch"
    GENERATOR = "generator"

    @classmethod
    def _open(cls, name: str) -> Any:
        kind = name.lower()
        return cls._made(name, kind) if _is_device_type(kind) else None


class DynamoBackend(_Words):
    """A compiler of ``torch.compile``: https://pytorch.org/docs/stable/torch.compiler.html.

    Packages register more under names of their own, so any upper-case name is a member;
    ``torch.compile`` says which are not there.

    Example:
        >>> from anydevice.utils import DynamoBackend
        >>> DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
        True
    """

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"

    @classmethod
    def _open(cls, name: str) -> Any:
        return cls._made(name, name) if re.fullmatch(r"[A-Z][A-Z0-9_]+", name) else None


class PrecisionType(_Words):
    """What a model computes in: float32, or a smaller dtype where autocast allows.

    Example:
        >>> from anydevice.utils import PrecisionType
        >>> PrecisionType("bf16") is PrecisionType.BF16
        True
    """

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class ComputeEnvironment(_Words):
    """Where processes run: on machines of your own, or at Amazon.

    Example:
        >>> from anydevice.utils import ComputeEnvironment
        >>> ComputeEnvironment.LOCAL_MACHINE.value
        'LOCAL_MACHINE'
    """

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(_Words):
    """How processes work together at Amazon.

    Example:
        >>> from anydevice.utils import SageMakerDistributedType
        >>> SageMakerDistributedType.NO.value
        'NO'
    """

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class LoggerType(_Words):
    """A tracker of experiments; ``ALL``: every one that is installed.

    Example:
        >>> from anydevice.utils import LoggerType
        >>> LoggerType("tensorboard") is LoggerType.TENSORBOARD
        True
    """

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class DDPCommunicationHookType(_Words):
    """How gradients are compressed between processes.

    Example:
        >>> from anydevice import DDPCommunicationHookType
        >>> DDPCommunicationHookType("fp16") is DDPCommunicationHookType.FP16
        True
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


def _is_device_type(kind: str) -> bool:
    if kind in registry.known_types():
        return True
    try:
        return torch.device(kind).type == kind
    except RuntimeError:
        return False
