"""The steps of random programs over streams, threads and devices."""

from __future__ import annotations

import dataclasses
from typing import Final

from hypothesis import strategies as st

__all__ = ["Step", "programs"]

_USUAL: Final = ("kernel", "in place", "upload", "download", "cross", "record", "host waits")
_SELDOM: Final = ("blocking download", "blocking cross", "let go", "wait for all", "other members")
_KINDS: Final = (*_USUAL, *_USUAL, *_SELDOM, "retire")


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a program: what is done, to which value, on which stream, in what situation."""

    kind: str
    value: int
    stream: int
    situation: int

    def __repr__(self) -> str:
        place = f"{self.kind} value {self.value} on stream {self.stream}"
        return f"{place} in situation {self.situation}" if self.situation else place


def programs() -> st.SearchStrategy[list[Step]]:
    """Programs of up to 14 steps; numbers are taken modulo what there is."""
    step = st.builds(
        Step,
        st.sampled_from(_KINDS),
        st.integers(0, 9),
        st.integers(0, 8),
        st.sampled_from([0] * 20 + list(range(1, 16))),
    )
    return st.lists(step, min_size=2, max_size=14)
