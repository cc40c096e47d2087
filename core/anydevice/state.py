"""The reference's import path for the states of processes. No logic here."""

from anydevice.processes import DistributedType, PartialState

__all__ = ["DistributedType", "PartialState"]
