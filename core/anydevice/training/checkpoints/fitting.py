"""Loading models and optimizers in two steps: first all is checked, then all is loaded.

Each `plan_...` reads what says whether the files are whole and fit, changes nothing, and returns a
function that loads. A checkpoint of which one part does not fit so leaves everything as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from anydevice.engines import Engine
from anydevice.errors import AnyDeviceError, CheckpointMismatchError, CheckpointNotFoundError
from anydevice.text import list_some
from anydevice.training.checkpoints.reading import Parts, read_safetensors, read_torch, shapes_of
from anydevice.training.checkpoints.weights import ModelFiles, numbered_name

__all__ = ["plan_model", "plan_optimizer"]

#: What torch says of states that do not fit, of a module and of an optimizer.
_MISFIT: Final = re.compile(r"loading state_dict|loaded state dict|size mismatch")


def plan_model(
    engine: Engine, model: nn.Module, folder: Path, index: int, strict: bool = True
) -> Callable[[], None]:
    """See that a model's weights are there and fit, in parts or whole, whatever engine wrote them.

    Returns:
        A function that loads them; all processes call it.

    Raises:
        CheckpointNotFoundError: the folder has none for it.
        CheckpointMismatchError: they are another model's.
        CorruptCheckpointError: a file is damaged.
    """
    parts = Parts(folder, ModelFiles.parts.format(index), "model", index)
    safe = folder / numbered_name(ModelFiles.safe, index)
    plain = folder / numbered_name(ModelFiles.torch_file, index)
    module = engine.unwrap(model)
    what = f"model {index} ({type(module).__name__})"
    if parts.exist():
        _check_parts(parts, engine, model, what, strict)
        return lambda: _load_parts(engine, model, parts, what, strict)
    if safe.exists():
        shapes = {key: torch.empty(size, device="meta") for key, size in shapes_of(safe).items()}
        _check_whole(module, _own(engine, model, shapes), safe, what, strict)
        return lambda: _load_whole(engine, model, read_safetensors(safe), safe, what, strict)
    if plain.exists():
        state = read_torch(plain)
        _check_whole(module, _own(engine, model, state), plain, what, strict)
        return lambda: _load_whole(engine, model, state, plain, what, strict)
    raise CheckpointNotFoundError(
        f"{str(folder)!r} has no weights for model {index}: neither {parts.path.name}, {safe.name} "
        f"nor {plain.name}. Prepare as many models, in the same order, as were saved"
    )


def _load_whole(
    engine: Engine, model: nn.Module, state: dict[str, Any], file: Path, what: str, strict: bool
) -> None:
    state = _own(engine, model, state)
    with _fitting(file, what):
        engine.load_state_dict(model, state, strict=strict)


def _load_parts(engine: Engine, model: nn.Module, parts: Parts, what: str, strict: bool) -> None:
    state = engine.state_dict(model, full=False)
    parts.read(state)
    with _fitting(parts.path, what):
        engine.load_state_dict(model, state, strict=strict)


def _own(engine: Engine, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The state with all names of a weight that the file has under one; no other process's."""
    for names in engine.tied_names(model):
        have = next((name for name in names if name in state), None)
        if have is not None:
            state.update(dict.fromkeys(names, state[have]))
    return {name: value for name, value in state.items() if name not in engine.elsewhere}


class _Unchanged(TorchFunctionMode):
    """Modules check what they load, and nothing is copied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.copy_ else func(*args, **(kwargs or {}))


def _check_whole(
    module: nn.Module, state: Mapping[str, Any], file: Path, what: str, strict: bool
) -> None:
    """See that a state fits; where its keys or shapes are others, the module's own hooks decide."""
    wanted = module.state_dict()
    if wanted.keys() == state.keys() and all(
        getattr(value, "shape", None) == getattr(state[key], "shape", None)
        for key, value in wanted.items()
    ):
        return
    with _fitting(file, what), _Unchanged():
        module.load_state_dict(dict(state), strict=strict)


def _check_parts(parts: Parts, engine: Engine, model: nn.Module, what: str, strict: bool) -> None:
    """See that the parts have each tensor of a model, in its shape, and no others."""
    have, wanted = parts.shapes(), engine.state_dict(model, full=False)
    faults = [f"it has no {name}" for name in wanted if name not in have]
    if strict:
        known = {*wanted, *engine.unwrap(model).state_dict(), *engine.elsewhere}
        faults += [f"it has {name}, which the model has not" for name in have if name not in known]
    for name, value in wanted.items():
        size, shape = have.get(name), getattr(value, "shape", None)
        if size is not None and size != shape:
            faults.append(f"size mismatch for {name}: {tuple(size)}, and {tuple(shape or ())} here")
    if faults:
        raise CheckpointMismatchError(_misfit(parts.path, what, list_some(faults, separator="; ")))


def plan_optimizer(
    engine: Engine, model: nn.Module, optimizer: Any, folder: Path, index: int, **kwargs: Any
) -> Callable[[], None]:
    """See that an optimizer's state is there and fits, as `plan_model` does.

    Returns:
        A function that loads it; all processes call it.

    Raises:
        CheckpointNotFoundError: the folder has none for it.
        CheckpointMismatchError: it is another optimizer's.
        CorruptCheckpointError: a file is damaged.
    """
    parts = Parts(folder, ModelFiles.optimizer_parts.format(index), "optimizer", index)
    whole = folder / numbered_name(ModelFiles.optimizer, index)
    what = f"optimizer {index}"
    if parts.exist():
        _check_names(parts, engine, model, what)

        def load_parts() -> None:
            state = engine.state_dict(model, optimizer, full=False)
            parts.read(state)
            with _fitting(parts.path, what):
                engine.load_state_dict(model, state, optimizer)

        return load_parts
    if not whole.exists():
        raise CheckpointNotFoundError(
            f"{str(folder)!r} has no state for {what}: neither {parts.path.name} nor "
            f"{whole.name}. Prepare as many optimizers, in the same order, as were saved"
        )
    state = read_torch(whole, **kwargs)
    if not engine.elsewhere:  # else this process has a part of each group
        _check_groups(state, optimizer, whole, what)

    def load() -> None:
        with _fitting(whole, what):
            engine.load_state_dict(model, state, optimizer)

    return load


def _check_groups(state: Mapping[str, Any], optimizer: Any, file: Path, what: str) -> None:
    """See that a whole state has as many groups, with as many parameters, as the optimizer."""
    saved = [len(group["params"]) for group in state["param_groups"]]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if saved != mine:
        raise CheckpointMismatchError(
            _misfit(file, what, f"its groups have {saved} parameters, and {mine} here")
        )


def _check_names(parts: Parts, engine: Engine, model: nn.Module, what: str) -> None:
    """See that parts are of parameters that the model has."""
    here = engine.unwrap(model).named_parameters(remove_duplicate=False)
    known = {*(name for name, _ in here), *engine.elsewhere}
    of = {
        name.removeprefix("state.").rpartition(".")[0]
        for name in parts.shapes()
        if name.startswith("state.")
    }
    strange = sorted(of - known)
    if strange:
        raise CheckpointMismatchError(
            _misfit(parts.path, what, f"it has {list_some(strange)}, which the model has not")
        )


@contextmanager
def _fitting(path: Path, what: str) -> Iterator[None]:
    """Name the file and what it is loaded into, where torch says that they do not fit."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        # A lost process or a lack of memory is a RuntimeError too, and says so itself.
        if isinstance(error, AnyDeviceError) or not _MISFIT.search(str(error)):
            raise
        raise CheckpointMismatchError(_misfit(path, what, str(error).strip())) from error


def _misfit(path: Path, what: str, why: str) -> str:
    return (
        f"{str(path)!r} does not fit {what}: {why}\n"
        "Prepare the same things, in the same order, as when it was saved"
    )
