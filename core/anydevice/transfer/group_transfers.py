"""The transfers of one group: the sums of a profile, and its table's row."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anydevice.transfer.profile import Span

__all__ = ["GroupTransfers"]


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

    @classmethod
    def of(cls, group: str, device: str, spans: list[Span]) -> GroupTransfers:
        """Sum spans up."""
        transfers = [span for span in spans if span.row == "link"]
        return cls(
            group,
            device,
            len(spans) - len(transfers),
            sum(span.ahead for span in transfers),
            sum(span.nbytes for span in transfers),
            sum(span.copies for span in transfers),
            sum(span.seconds for span in transfers),
            sum(span.waited for span in spans),
        )

    def cells(self) -> tuple[str, ...]:
        """Its row in the table of a profile."""
        return (
            self.group or "(root)",
            self.device,
            str(self.uses),
            str(self.ahead),
            f"{self.bytes / 1e6:.1f}",
            str(self.copies),
            f"{self.seconds * 1e3:.2f}",
            f"{self.waited * 1e3:.2f}",
        )
