"""Where a loader is: the epoch, and how many batches came out in it."""

from __future__ import annotations

from typing import Any

from anydevice.errors import OptionError

__all__ = ["Progress"]


class Progress:
    """The place in the data, shared by a loader and the one that `skip_first_batches` makes of it.

    Batches are counted as the undivided loader has them, so the place holds for any number of
    processes.

    Attributes:
        epoch: the epoch that runs, or that the next iteration has.
        batches: batches of the undivided loader that came out in this epoch.
        size: samples in such a batch; None where that is not fixed.
        told: whether the user names the epochs, with ``set_epoch``: then so does the loader to
            the user's own samplers and data sets.
    """

    def __init__(self, seed: int = 0, size: int | None = None) -> None:
        self.seed = seed
        self.size = size
        self.epoch = 0
        self.batches = 0
        self.told = False
        self._resume_at = 0
        self._looked = 0
        self._open = False

    def begin(self, skip: int, units: int) -> int:
        """Begin an iteration; return how many batches of the undivided loader it leaves out.

        Args:
            skip: how many it is to leave out at least.
            units: how many of them make one batch of the loader.

        An iteration that was left early has been an epoch, unless only its first batch was
        taken: that is a look at the data.
        """
        if self._open and self.batches > self._looked:
            self.epoch += 1
        start = max(skip, self._resume_at)
        self._resume_at = 0
        self.batches = start
        self._looked = start + units
        self._open = True
        return start

    def finish(self) -> None:
        """Note that an iteration came to its end."""
        self.epoch += 1
        self.batches = 0
        self._open = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a place to go on from in another is given up."""
        if epoch != self.epoch:
            self._resume_at = 0
        self.epoch, self.told = epoch, True
        self.batches = self._resume_at
        self._open = False

    def state_dict(self) -> dict[str, Any]:
        """The place, as plain numbers."""
        batches = self.batches if self._open else self._resume_at
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "batches": batches,
            "size": self.size,
            "told": self.told,
        }

    def load_state_dict(self, state: dict[str, Any], *, resume: bool = True) -> None:
        """Go to a place.

        Args:
            state: from `state_dict`.
            resume: the next iteration begins there; else at the beginning of that epoch.

        Raises:
            OptionError: not such a state, or a place within a batch of this loader.
        """
        missing = {"seed", "epoch", "batches"} - state.keys()
        if missing:
            raise OptionError(f"not the state of a prepared loader: it has no {sorted(missing)}")
        self.seed, self.epoch = int(state["seed"]), int(state["epoch"])
        self.told = bool(state.get("told", False))
        self._resume_at = self._in_own_batches(state) if resume else 0
        self.batches = self._resume_at
        self._open = False

    def _in_own_batches(self, state: dict[str, Any]) -> int:
        """The place in batches of this loader, which may be larger or smaller."""
        batches, size = int(state["batches"]), state.get("size")
        if size is None or self.size is None or size == self.size:
            return batches
        own, rest = divmod(batches * int(size), self.size)
        if rest:
            raise OptionError(
                f"{batches * int(size)} samples were used when this state was saved, in batches of "
                f"{size}: that is no whole number of this loader's batches of {self.size}"
            )
        return own
