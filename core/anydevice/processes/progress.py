"""A progress bar that one process of each machine shows."""

from __future__ import annotations

from typing import Any

from anydevice.processes.state import PartialState

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, which shows nothing on the other processes of a machine.

    Args:
        *args: of tqdm.
        main_process_only: whether only the first process of each machine shows it.
        **kwargs: of tqdm.

    Example:
        >>> from anydevice.utils import tqdm
        >>> list(tqdm(range(3), disable=True))
        [0, 1, 2]
    """
    from tqdm.auto import tqdm as bar

    if main_process_only and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
