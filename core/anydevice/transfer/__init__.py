"""When weights move: one place decides, and hooks ask it. See docs/transfers.md."""

from anydevice.transfer.carrying import carry, page_lock
from anydevice.transfer.engine import Engine
from anydevice.transfer.profile import TransferProfile, UnitTransfers, profile_transfers
from anydevice.transfer.settings import read_prefetch_depth
from anydevice.transfer.unit import Unit

__all__ = [
    "Engine",
    "TransferProfile",
    "Unit",
    "UnitTransfers",
    "carry",
    "page_lock",
    "profile_transfers",
    "read_prefetch_depth",
]
