"""When weights move: one place decides, and hooks ask it."""

from anydevice.transfer.engine import Engine
from anydevice.transfer.unit import Unit

__all__ = ["Engine", "Unit"]
