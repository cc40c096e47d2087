"""Writing a checkpoint while training goes on.

What is saved is copied to the host first; then torch's `async_save` writes it in a thread, and
another thread names the folder when every process has written its part. The processes agree
through a group of their own, so that nothing mixes with the collectives of training.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from anydevice.errors import CheckpointError
from anydevice.processes import PartialState
from anydevice.training.checkpoints.folders import Writing
from anydevice.training.checkpoints.telling import tell_errors
from anydevice.training.checkpoints.weights import ModelFiles, is_alone

__all__ = ["BackgroundSave"]


class BackgroundSave:
    """The checkpoint that is being written in the background, if there is one.

    Args:
        state: this process.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._group: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._running: tuple[Future[None], Path] | None = None

    def start(
        self, weights: dict[str, Any], writing: Writing, writes: bool, then: Callable[[], Any]
    ) -> None:
        """Copy ``weights`` to the host, and write them in the background; all processes call this.

        Args:
            weights: state dicts by name.
            writing: the checkpoint that is complete then.
            writes: whether this process makes it so.
            then: called afterwards, where ``writes``.
        """
        from torch.distributed.checkpoint.state_dict_saver import async_save

        alone = is_alone()
        if self._group is None and not alone:
            self._group = torch.distributed.new_group(backend="gloo")
        place = str(writing.place / ModelFiles.together)
        written = async_save(weights, checkpoint_id=place, process_group=self._group, no_dist=alone)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "anydevice-save")
        finishing = self._threads.submit(_finish, written, writing if writes else None, then)
        self._running = (finishing, writing.folder)

    def wait(self) -> None:
        """Wait until the checkpoint is complete; all processes call this.

        Raises:
            CheckpointError: it could not be written, on this process or another; what the folder
                held before is still there.
            MissingRankError: not all processes call this.
        """
        if self._running is None:
            return
        (running, folder), self._running = self._running, None
        error = running.exception()
        texts = tell_errors(self._state, "wait_for_save", error)
        if texts:
            raise CheckpointError(
                f"save_state(asynchronous=True) could not write {folder.name!r}, and left what "
                f"was there before. See to the cause and save again. {texts}"
            ) from error


def _finish(written: Any, writing: Writing | None, then: Callable[[], Any]) -> None:
    try:
        written.result()
        if writing is not None:
            writing.commit()
            then()
    except BaseException:
        if writing is not None:
            writing.give_up()
        raise
