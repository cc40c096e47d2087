"""Reading a checkpoint back, whatever number of processes and engine wrote it.

All is read and checked before anything is changed, on every process; then all is loaded, random
states last, so that nothing drawn while loading counts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anydevice.arguments import refuse_unknown_argument
from anydevice.engines import OwnFiles
from anydevice.errors import CheckpointError, CheckpointNotFoundError, OptionError
from anydevice.training.checkpoints.fitting import plan_model, plan_optimizer
from anydevice.training.checkpoints.folders import complete
from anydevice.training.checkpoints.random_states import set_random_states
from anydevice.training.checkpoints.reading import read_torch
from anydevice.training.checkpoints.saving import SaveRequest, model_of
from anydevice.training.checkpoints.telling import tell_errors
from anydevice.training.checkpoints.weights import numbered_name

__all__ = ["load_checkpoint"]


def load_checkpoint(
    request: SaveRequest, folder: Path, *, resume: bool, load_kwargs: dict[str, Any], **model: Any
) -> None:
    """Read a checkpoint; all processes call this. An error leaves all as it was.

    Args:
        request: what is loaded.
        folder: written by `save_checkpoint`, or by the reference.
        resume: the next iteration of each loader goes on where it was saved; else it begins the
            epoch again, for scripts that skip batches themselves.
        load_kwargs: for `torch.load`.
        **model: ``strict``, for the models.

    Raises:
        CheckpointNotFoundError: no such folder, or something is not in it.
        CheckpointMismatchError: it was made from other things.
        CorruptCheckpointError: a file is damaged.
        CheckpointError: one of these, on another process.
        OptionError: there is nothing to load it into.
    """
    for name in model.keys() - {"strict"}:
        refuse_unknown_argument("load_state", name, ("input_dir", "load_kwargs", "strict"))
    if request.is_empty:
        raise OptionError(
            "load_state has nothing to load into: call prepare(model, optimizer, ...) and "
            "register_for_checkpointing(...) before it"
        )
    state = request.state
    if request.writes and folder.is_dir():
        complete(folder)
    state.meet("load_state", folder.name)
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there is no folder {str(folder)!r} to load from")
    plan = _Plan(request, folder, resume, load_kwargs)
    error: Exception | None = None
    try:
        plan.read(model)
        plan.load_objects()
    except Exception as raised:  # noqa: BLE001 - it goes on below; the other processes wait
        error = raised
    texts = tell_errors(state, "load_state, checked", error)
    if texts:
        plan.undo()
        raise error or CheckpointError(
            f"{str(folder)!r} is not loaded, since it cannot be on another process:\n{texts}"
        )
    plan.load_weights()
    state.meet("load_state, loaded")


class _Plan:
    """What is loaded, once it is known that all of it can be."""

    def __init__(
        self, request: SaveRequest, folder: Path, resume: bool, load_kwargs: dict[str, Any]
    ) -> None:
        self._request, self._folder = request, folder
        self._resume, self._load_kwargs = resume, load_kwargs
        self._weights: list[Callable[[], Any]] = []
        self._objects: list[tuple[Callable[[], Any], Callable[[], Callable[[], Any]]]] = []
        self._undo: list[Callable[[], Any]] = []

    def read(self, options: dict[str, Any]) -> None:
        """Read and check all, and change nothing but what the user's hooks do."""
        request, folder = self._request, self._folder
        rest = self._read_rest()
        self._read_objects()
        prepared = dict(zip(map(id, request.modules), request.models, strict=True))
        models = request.modules
        for hook in request.hooks:
            hook(models, str(folder))
        if isinstance(request.engine, OwnFiles):
            self._weights = [functools.partial(request.engine.load_files, folder), *rest]
            return
        weights = [
            plan_model(request.engine, prepared.get(id(model), model), folder, index, **options)
            for index, model in enumerate(models)
        ]
        optimizers = [
            plan_optimizer(
                request.engine,
                model_of(request, optimizer),
                optimizer,
                folder,
                index,
                **self._load_kwargs,
            )
            for index, optimizer in enumerate(request.optimizers)
        ]
        self._weights = [*weights, *optimizers, *rest]

    def _read_objects(self) -> None:
        """Schedulers, registered objects, loaders: only they themselves know what fits."""
        for index, scheduler in enumerate(self._request.schedulers):
            name = numbered_name("scheduler.bin", index)
            path = _need(self._folder / name, f"scheduler {index}")
            self._objects.append(_stateful(scheduler, read_torch(path, **self._load_kwargs)))
        for index, thing in enumerate(self._request.custom):
            name = f"custom_checkpoint_{index}.pkl"
            path = _need(self._folder / name, f"registered object {index}")
            self._objects.append(_stateful(thing, _read_custom(path, self._load_kwargs)))
        for index, loader in enumerate(self._request.dataloaders):
            saved = self._saved(numbered_name("dataloader.bin", index))
            if saved is not None:
                self._objects.append(_progress(loader.progress, saved, self._resume))

    def _read_rest(self) -> list[Callable[[], Any]]:
        """The scaler and random states; the reference's checkpoints may lack them."""
        request, loads = self._request, []
        scaler = self._saved("scaler.pt")
        if request.scaler is not None and scaler is not None:
            loads.append(lambda: request.scaler.load_state_dict(scaler))
        random = self._saved(f"random_states_{request.state.process_index}.pkl")
        if random is not None:
            loads.append(lambda: set_random_states(random, request.state))
        return loads

    def _saved(self, name: str) -> Any:
        path = self._folder / name
        return read_torch(path, **self._load_kwargs) if path.exists() else None

    def load_objects(self) -> None:
        """Load what may refuse its state by itself; `undo` takes it back."""
        for load, keep in self._objects:
            self._undo.append(keep())
            load()

    def undo(self) -> None:
        """Give all that `load_objects` loaded its state from before."""
        for undo in self._undo:
            with contextlib.suppress(Exception):  # the error to show is the first one
                undo()

    def load_weights(self) -> None:
        """Load all else."""
        for load in self._weights:
            load()


def _stateful(thing: Any, state: Any) -> tuple[Callable[[], Any], Callable[[], Callable[[], Any]]]:
    """What loads an object, and what keeps its state of now: that returns what puts it back."""

    def keep() -> Callable[[], Any]:
        before = copy.deepcopy(thing.state_dict())
        return lambda: thing.load_state_dict(before)

    return lambda: thing.load_state_dict(state), keep


def _progress(
    progress: Any, state: Any, resume: bool
) -> tuple[Callable[[], Any], Callable[[], Callable[[], Any]]]:
    """The same for a loader's place, which its ``state_dict`` does not say in all detail."""

    def keep() -> Callable[[], Any]:
        before = dict(vars(progress))
        return lambda: vars(progress).update(before)

    return lambda: progress.load_state_dict(state, resume=resume), keep


def _need(path: Path, what: str) -> Path:
    if not path.exists():
        raise CheckpointNotFoundError(
            f"{str(path.parent)!r} has no {path.name} for {what}: prepare and register the same "
            "things, in the same order, as when it was saved"
        )
    return path


def _read_custom(path: Path, load_kwargs: dict[str, Any]) -> Any:
    import pickle

    try:
        return read_torch(path, **load_kwargs)
    except pickle.UnpicklingError as error:
        raise OptionError(
            f"{str(path)!r} holds objects of your own classes, and reading them can run code. If "
            "you trust the file: load_state(..., load_kwargs={'weights_only': False})"
        ) from error
