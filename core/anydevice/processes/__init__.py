"""Processes that work together: which one this is, its device, and the group.

See `PartialState`. Collectives on nested data stand in `anydevice.collectives`.
"""

from __future__ import annotations

from anydevice.processes.environment import Launch, read_launch, setting
from anydevice.processes.group import collective_backends, join_group
from anydevice.processes.kinds import (
    ComputeEnvironment,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
)
from anydevice.processes.progress import tqdm
from anydevice.processes.state import PartialState, wait_for_everyone

__all__ = [
    "ComputeEnvironment",
    "DDPCommunicationHookType",
    "DistributedType",
    "DynamoBackend",
    "Launch",
    "LoggerType",
    "PartialState",
    "PrecisionType",
    "RNGType",
    "SageMakerDistributedType",
    "collective_backends",
    "join_group",
    "read_launch",
    "setting",
    "tqdm",
    "wait_for_everyone",
]
