"""Writing a checkpoint: every process its part, then one renaming."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from anydevice.engines import Engine, OwnFiles
from anydevice.errors import OptionError
from anydevice.processes import PartialState
from anydevice.training.checkpoints.background import BackgroundSave
from anydevice.training.checkpoints.folders import Writing
from anydevice.training.checkpoints.random_states import random_states
from anydevice.training.checkpoints.weights import (
    ModelFiles,
    numbered_name,
    save_parts,
    save_whole,
)

__all__ = ["SaveRequest", "model_of", "save_checkpoint"]

_HINT: Final = (
    "For a script that calls save_state under `if is_main_process`: `anydevice launch "
    "--save_state_alone`, or ProjectConfiguration(save_state_alone=True)."
)


@dataclasses.dataclass
class SaveRequest:
    """What is saved or loaded.

    Attributes:
        engine: of the models.
        state: this process.
        models, optimizers, schedulers, dataloaders, custom: what was prepared or registered.
        scaler: the loss scaler; None where there is none.
        hooks: called with the models, their states and the folder before anything is written.
        safe: models are safetensors files.
        whole: weights are written whole, by the main process, though they are sharded.
        writes: whether this process writes what one process of all, or of a machine, writes.
        alone: this process saves by itself, and waits for no other.
    """

    engine: Engine
    state: PartialState
    models: Sequence[Any]
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    dataloaders: Sequence[Any]
    custom: Sequence[Any]
    scaler: Any = None
    hooks: Sequence[Callable[..., Any]] = ()
    safe: bool = True
    whole: bool = False
    writes: bool = True
    alone: bool = False

    def save_alone(self) -> None:
        """Have this process save by itself, where it has all that is saved.

        Raises:
            OptionError: it is none that writes.
        """
        if not self._has_all:
            return
        if not self.writes:
            raise OptionError(
                f"save_state_alone is set, and process {self.state.process_index} calls "
                "save_state, which the main process alone makes then: leave --save_state_alone "
                "out where all processes make the call"
            )
        self.alone = True

    def meet(self, call: str, description: Any = None) -> None:
        """See that all processes are here."""
        if not self.alone:
            self.state.meet(call, description, hint=_HINT if self._has_all else "")

    @property
    def _has_all(self) -> bool:
        """Whether each process has all weights, and optimizers' states."""
        return not (self.engine.sharded or isinstance(self.engine, OwnFiles))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that a checkpoint could be loaded into."""
        things = (self.models, self.optimizers, self.schedulers, self.dataloaders, self.custom)
        return not any((*things, self.hooks))

    @property
    def modules(self) -> list[Any]:
        """The user's own modules, for hooks: scripts ask them for their class."""
        return [self.engine.unwrap(model) for model in self.models]

    @property
    def in_parts(self) -> bool:
        """Whether each process writes its part of the weights."""
        return self.engine.sharded and not self.whole


def save_checkpoint(
    request: SaveRequest,
    folder: Path,
    background: BackgroundSave | None = None,
    then: Callable[[], Any] = lambda: None,
) -> Path:
    """Write a checkpoint into ``folder``; all processes call this, or one that saves alone.

    Args:
        request: what is saved.
        folder: where.
        background: writes the weights, and names the folder then; this returns before.
        then: called when the checkpoint is complete, on processes that write.

    Raises:
        OptionError: in the background, and another layout than parts was asked for.
        MissingRankError: not all processes make the call; the message names each one's line.
    """
    if background is not None:
        _check_asynchronous(request)
    request.meet("save_state", str(folder.name))
    writing = Writing(folder)
    if request.writes:
        writing.begin()
    request.meet("save_state, writing")
    weights: dict[str, Any] | None = None if background is None else {}
    try:
        _write(request, writing.place, weights)
        request.meet("save_state, written")
        if background is not None and weights is not None:
            background.start(weights, writing, request.writes, then)
            return folder
    except BaseException:
        if request.writes:
            writing.give_up()
        raise
    if request.writes:
        writing.commit()
        then()
    request.meet("save_state, complete")
    return folder


def _check_asynchronous(request: SaveRequest) -> None:
    """Refuse what would ask for another layout than parts."""
    if isinstance(request.engine, OwnFiles):
        raise OptionError(
            f"save_state(asynchronous=True): the engine {request.engine.name!r} writes its own "
            "files, at once: leave asynchronous out"
        )
    if not request.safe:
        raise OptionError(
            "save_state(asynchronous=True) writes parts: leave safe_serialization out"
        )
    if request.engine.sharded and request.whole:
        raise OptionError(
            "save_state(asynchronous=True) writes parts, and the plugin's state_dict_type is "
            "'FULL_STATE_DICT': set 'SHARDED_STATE_DICT', or save without asynchronous"
        )


def _write(request: SaveRequest, place: Path, later: dict[str, Any] | None) -> None:
    """Write all files; weights and optimizers are put into ``later`` instead, where it is given."""
    in_parts = request.in_parts or later is not None
    models = request.modules
    weights = [request.engine.state_dict(model, full=not in_parts) for model in request.models]
    for hook in request.hooks:
        hook(models, weights, str(place))
    for index, weight in enumerate(weights):
        if later is not None:
            later[numbered_name("model", index)] = weight
        elif request.in_parts:
            save_parts({"model": weight}, place / ModelFiles.parts.format(index))
        elif request.writes:
            save_whole(weight, place, index, request.safe)
    _write_optimizers(request, place, later)
    if request.writes:
        _write_rest(request, place, later is not None)
    rank = request.state.process_index
    torch.save(random_states(request.state), place / f"random_states_{rank}.pkl")


def _write_optimizers(request: SaveRequest, place: Path, later: dict[str, Any] | None) -> None:
    if isinstance(request.engine, OwnFiles):
        request.engine.save_files(place)
        return
    for index, optimizer in enumerate(request.optimizers):
        model = model_of(request, optimizer)
        if later is not None or request.in_parts:
            state = request.engine.state_dict(model, optimizer, full=False)
            if later is not None:
                later[numbered_name("optimizer", index)] = state
            else:
                save_parts({"optimizer": state}, place / ModelFiles.optimizer_parts.format(index))
            continue
        state = request.engine.state_dict(model, optimizer, full=True)
        if request.writes:
            torch.save(state, place / numbered_name(ModelFiles.optimizer, index))


def _write_rest(request: SaveRequest, place: Path, together: bool) -> None:
    for index, scheduler in enumerate(request.schedulers):
        torch.save(scheduler.state_dict(), place / numbered_name("scheduler.bin", index))
    for index, loader in enumerate(request.dataloaders):
        torch.save(loader.state_dict(), place / numbered_name("dataloader.bin", index))
    if request.scaler is not None:
        torch.save(request.scaler.state_dict(), place / "scaler.pt")
    for index, thing in enumerate(request.custom):
        torch.save(thing.state_dict(), place / f"custom_checkpoint_{index}.pkl")
    about = {
        "format": 1,
        "processes": request.state.num_processes,
        "engine": request.engine.name,
        "together": together,
    }
    (place / ModelFiles.about).write_text(json.dumps(about), encoding="utf-8")


def model_of(request: SaveRequest, optimizer: Any) -> Any:
    """The model whose parameters an optimizer changes; the first one where there is no other."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in request.models:
        if any(id(p) in mine for p in model.parameters()):
            return model
    return request.models[0] if request.models else None
