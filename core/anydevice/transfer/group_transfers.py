"""The transfers of one group: the sums of a profile, and its table's row."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anydevice.transfer.profile import Span

__all__ = ["GroupTransfers", "sum_up", "table_row"]


@dataclasses.dataclass(frozen=True)
class GroupTransfers:
    """What a group's weights cost.

    Attributes:
        group: its name.
        device: where they were needed.
        uses: how often.
        ahead: how many of these were prefetched.
        bytes: that were copied.
        copies: that it took.
        seconds: that the copies took.
        waited: seconds for which the device stood still for them.
    """

    group: str
    device: str
    uses: int
    ahead: int
    bytes: int
    copies: int
    seconds: float
    waited: float


def sum_up(group: str, device: str, spans: list[Span]) -> GroupTransfers:
    """Sum up the spans of one group on one device."""
    transfers = [span for span in spans if span.row == "link"]
    uses = [span for span in spans if span.row == "compute"]
    return GroupTransfers(
        group,
        device,
        len(uses),
        sum(span.ahead for span in transfers),
        sum(span.nbytes for span in transfers),
        sum(span.copies for span in transfers),
        sum(span.seconds for span in transfers),
        sum(span.waited for span in uses),
    )


def table_row(group: GroupTransfers) -> tuple[str, ...]:
    """The cells of a group in the table of a profile."""
    return (
        group.group or "(root)",
        group.device,
        str(group.uses),
        str(group.ahead),
        f"{group.bytes / 1e6:.1f}",
        str(group.copies),
        f"{group.seconds * 1e3:.2f}",
        f"{group.waited * 1e3:.2f}",
    )
