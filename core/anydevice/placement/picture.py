"""A placement as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anydevice.placement.result import Placement

__all__ = ["draw"]


def draw(placement: Placement) -> str:
    """One self-contained SVG."""
    return f"<svg xmlns='http://www.w3.org/2000/svg'><title>{placement.model}</title></svg>"
