"""What went wrong on one process is told to all, so that none goes on alone."""

from __future__ import annotations

from anydevice.processes import PartialState

__all__ = ["tell_errors"]


def tell_errors(state: PartialState, call: str, error: BaseException | None) -> str:
    """Tell all processes what went wrong on this one; all of them call this.

    Args:
        state: this process.
        call: what is being done.
        error: of this process, if there is one.

    Returns:
        A line for each process that told of an error; empty where all went well.

    Raises:
        MissingRankError: not all processes call this.
    """
    mine = b"" if error is None else f"{type(error).__name__}: {error}"[:1000].encode()
    said = state.meet(call, payload=mine)
    return "\n".join(
        f"rank {rank}: {text.decode(errors='replace')}" for rank, text in enumerate(said) if text
    )
