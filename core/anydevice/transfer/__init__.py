"""When weights move: one place decides, and hooks ask it. See docs/transfers.md."""

from anydevice.transfer.batched_copy import copy_batch, page_lock
from anydevice.transfer.engine import Engine
from anydevice.transfer.group import GroupCall, OffloadGroup
from anydevice.transfer.group_transfers import GroupTransfers
from anydevice.transfer.profile import TransferProfile, profile_transfers
from anydevice.transfer.settings import read_prefetch_depth
from anydevice.transfer.trace import PassCall

__all__ = [
    "Engine",
    "GroupCall",
    "GroupTransfers",
    "OffloadGroup",
    "PassCall",
    "TransferProfile",
    "copy_batch",
    "page_lock",
    "profile_transfers",
    "read_prefetch_depth",
]
