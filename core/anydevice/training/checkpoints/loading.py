"""Reading a checkpoint back, whatever number of processes and engine wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anydevice.errors import CheckpointNotFoundError, OptionError
from anydevice.training.checkpoints.folders import complete
from anydevice.training.checkpoints.random_states import set_random_states
from anydevice.training.checkpoints.saving import SaveRequest, model_of
from anydevice.training.checkpoints.weights import (
    load_model,
    load_optimizer,
    numbered_name,
    read_torch,
)

__all__ = ["load_checkpoint"]


def load_checkpoint(
    request: SaveRequest, folder: Path, *, resume: bool, load_kwargs: dict[str, Any], **model: Any
) -> None:
    """Read a checkpoint; all processes call this.

    Args:
        request: what is loaded.
        folder: written by `save_checkpoint`, or by the reference.
        resume: the next iteration of each loader goes on where it was saved; else it begins the
            epoch anew, for scripts that skip batches themselves.
        load_kwargs: for `torch.load`.
        **model: ``strict``, for the models.

    Raises:
        CheckpointNotFoundError: no such folder, or something is not in it.
        OptionError: it was made from other things.
    """
    unknown = model.keys() - {"strict"}
    if unknown:
        raise OptionError(f"load_state has no argument {sorted(unknown)[0]!r}; models take strict")
    state = request.state
    if request.writes and folder.is_dir():
        complete(folder)
    state.meet("load_state", folder.name)
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there is no folder {str(folder)!r} to load from")
    models = list(request.models)
    for hook in request.hooks:
        hook(models, str(folder))
    for index, each in enumerate(models):
        load_model(request.engine, each, folder, index, **model)
    for index, optimizer in enumerate(request.optimizers):
        owner = model_of(request, optimizer)
        load_optimizer(request.engine, owner, optimizer, folder, index, **load_kwargs)
    _load_rest(request, folder, resume, load_kwargs)
    # Last, so that nothing drawn while loading counts.
    mine = folder / f"random_states_{state.process_index}.pkl"
    if mine.exists():
        set_random_states(read_torch(mine, **load_kwargs), state)
    state.meet("load_state, loaded")


def _load_rest(
    request: SaveRequest, folder: Path, resume: bool, load_kwargs: dict[str, Any]
) -> None:
    for index, scheduler in enumerate(request.schedulers):
        path = _need(folder / numbered_name("scheduler.bin", index), f"scheduler {index}")
        scheduler.load_state_dict(read_torch(path, **load_kwargs))
    for index, loader in enumerate(request.dataloaders):
        path = folder / numbered_name("dataloader.bin", index)
        if path.exists():  # the reference's checkpoints have none
            loader.progress.load_state_dict(read_torch(path, **load_kwargs), resume=resume)
    scaler = folder / "scaler.pt"
    if request.scaler is not None and scaler.exists():
        request.scaler.load_state_dict(read_torch(scaler, **load_kwargs))
    for index, thing in enumerate(request.custom):
        path = _need(folder / f"custom_checkpoint_{index}.pkl", f"registered object {index}")
        thing.load_state_dict(_read_custom(path, load_kwargs))


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
