"""Saving and loading: the checkpoints of an `Accelerator`."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from anydevice.arguments import refuse_unknown_argument
from anydevice.engines import FullyShardedDataParallelPlugin
from anydevice.errors import OptionError
from anydevice.training.checkpoints import (
    BackgroundSave,
    SaveRequest,
    folders,
    load_checkpoint,
    save_checkpoint,
)
from anydevice.training.logging import AcceleratorLogging

__all__ = ["AcceleratorPersistence"]


class AcceleratorPersistence(AcceleratorLogging):
    """The checkpoints of an `Accelerator`."""

    _save_hooks: OrderedDict[int, Callable[..., Any]]
    _load_hooks: OrderedDict[int, Callable[..., Any]]
    _resumes: bool
    _background: BackgroundSave

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint that is named automatically."""
        return self.project_configuration.iteration

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes what one process writes."""
        each = self.project_configuration.save_on_each_node
        return self.is_local_main_process if each else self.is_main_process

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these with the rest: anything with ``state_dict`` and ``load_state_dict``.

        Raises:
            OptionError: something has not both.
        """
        for thing in objects:
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(thing, method, None)):
                    raise OptionError(
                        f"register_for_checkpointing: {type(thing).__name__} has no {method}()"
                    )
        self._custom_objects += objects

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before a checkpoint is written.

        ``models`` are the user's own modules, as `unwrap_model` gives them. What the hook removes
        from ``weights`` is not written; ``output_dir`` becomes the checkpoint.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before one is read; models it removes are not loaded.

        ``models`` are the user's own modules, as `unwrap_model` gives them.
        """
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        asynchronous: bool = False,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write models, optimizers, schedulers, loaders, the scaler, random states and the rest.

        All processes call this, or the main process with ``save_state_alone`` of
        `ProjectConfiguration`. The checkpoint is complete or absent, whenever a process ends.

        Args:
            output_dir: the folder; None with ``automatic_checkpoint_naming``.
            safe_serialization: models are safetensors files; else torch's.
            asynchronous: return when all is copied to the host, and write weights and optimizers
                in the background, each process its part, with any engine. The folder has its name
                when all is written: `wait_for_save`, `end_training` and what comes next wait.
            **save_model_func_kwargs: none are there.

        Returns:
            The folder.

        Raises:
            OptionError: no folder, or a file; an argument that is not there, or does not go with
                ``asynchronous``; a second process that calls it under ``save_state_alone``.
            CheckpointError: an asynchronous save before this could not be written.
            MissingRankError: not all processes call this; the message names each one's line.
        """
        if save_model_func_kwargs:
            known = ("output_dir", "safe_serialization", "asynchronous")
            refuse_unknown_argument("save_state", sorted(save_model_func_kwargs)[0], known)
        project = self.project_configuration
        request = self._request(self._save_hooks, safe=safe_serialization)
        if project.save_state_alone and not asynchronous:
            request.save_alone()
        request.meet("save_state")
        self.wait_for_save()
        folder = self._folder_to_save(output_dir, agree=not request.alone)

        def then() -> None:
            if project.automatic_checkpoint_naming and project.total_limit is not None:
                folders.remove_oldest(folder.parent, project.total_limit)

        save_checkpoint(request, folder, self._background if asynchronous else None, then)
        if project.automatic_checkpoint_naming:
            project.iteration = int(folder.name.rpartition("_")[2]) + 1
        return str(folder)

    def wait_for_save(self) -> None:
        """Wait until an asynchronous `save_state` has written all; all processes call this.

        Raises:
            CheckpointError: it could not be written, on some process.
        """
        self._background.wait()

    def end_training(self) -> None:
        """Wait for an asynchronous `save_state`; end all trackers' runs, and the process group.

        All processes call this at the end.

        Raises:
            CheckpointError: the checkpoint could not be written; the rest has ended all the same.
        """
        try:
            self.wait_for_save()
        finally:
            super().end_training()

    def _folder_to_save(self, output_dir: Any, *, agree: bool) -> Path:
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise OptionError(
                    "save_state needs output_dir, or ProjectConfiguration(project_dir=..., "
                    "automatic_checkpoint_naming=True)"
                )
            folder = Path(output_dir).absolute()
            if folder.is_file():
                raise OptionError(f"output_dir={str(folder)!r} is a file: give a folder")
            return folder
        parent = self._checkpoints()
        numbers = [max(folders.next_number(parent), project.iteration)]
        if agree and self.use_distributed:
            torch.distributed.broadcast_object_list(numbers, src=0)
        return parent / f"checkpoint_{numbers[0]}"

    def _checkpoints(self) -> Path:
        if self.project_dir is None:
            raise OptionError(
                "automatic_checkpoint_naming needs ProjectConfiguration(project_dir=...)"
            )
        return Path(self.project_dir).absolute() / "checkpoints"

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Read what `save_state` wrote, on any number of processes; all of them call this.

        All is checked before anything is loaded: an error on any process leaves everything as it
        was on all of them.

        Loaders have the saved epoch. They go on in its middle by themselves with
        ``DataLoaderConfiguration(use_stateful_dataloader=True)``; else skip with
        `skip_first_batches`.

        Args:
            input_dir: the folder; None with ``automatic_checkpoint_naming`` is the newest.
            load_kwargs: for `torch.load`.
            **load_model_func_kwargs: ``strict``, for the models.

        Raises:
            CheckpointNotFoundError: there is no such folder, or something is not in it.
            CheckpointMismatchError: a model or optimizer is not the one that was saved.
            CorruptCheckpointError: a file is damaged.
            CheckpointError: one of these on another process; or an asynchronous save before this
                could not be written.
            OptionError: no folder; nothing is prepared or registered to load into.
        """
        self.wait_for_save()
        project = self.project_configuration
        if input_dir is not None:
            folder = Path(input_dir).absolute()
        elif project.automatic_checkpoint_naming:
            folder = folders.newest(self._checkpoints())
        else:
            raise OptionError(
                "load_state needs input_dir, or ProjectConfiguration(project_dir=..., "
                "automatic_checkpoint_naming=True)"
            )
        load_checkpoint(
            self._request(self._load_hooks),
            folder,
            resume=self._resumes,
            load_kwargs=load_kwargs or {},
            **load_model_func_kwargs,
        )

    def _request(self, hooks: dict[int, Any], safe: bool = True) -> SaveRequest:
        plugin = self.engine.setup.options.get(FullyShardedDataParallelPlugin)
        return SaveRequest(
            engine=self.engine,
            state=self.state._partial,
            models=self._models,
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            dataloaders=self._dataloaders,
            custom=self._custom_objects,
            scaler=None if self._loss_scaler is None else self._loss_scaler.grad_scaler,
            hooks=list(hooks.values()),
            safe=safe,
            whole=plugin is not None and plugin.state_dict_type == "FULL_STATE_DICT",
            writes=self.should_save_model,
        )

    # ------------------------------------------------------------------ models alone

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's whole state under the plain model's keys; all processes call this.

        Args:
            model: a prepared model.
            unwrap: accepted; keys are always the plain model's.

        Returns:
            The tensors; where weights are sharded, on the host, and empty but on the main process.
        """
        state: dict[str, Any] = self.engine.state_dict(model, full=True)
        return state

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Export the model's weights as files that `load_checkpoint_in_model` and others read.

        All processes call this; the main process writes.

        Args:
            model: a prepared model.
            save_directory: the folder.
            max_shard_size: of one file: in bytes, or such as "10GB".
            safe_serialization: safetensors files; else torch's.

        Raises:
            OptionError: ``save_directory`` is a file.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise OptionError(f"save_directory={str(folder)!r} is a file: give a folder")
        state = self.get_state_dict(model)
        if self.should_save_model:
            from huggingface_hub import save_torch_state_dict

            folder.mkdir(parents=True, exist_ok=True)
            save_torch_state_dict(
                state, folder, max_shard_size=max_shard_size, safe_serialization=safe_serialization
            )
        self.wait_for_everyone()

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write ``obj`` on the main process; as safetensors with ``safe_serialization``."""
        if not self.should_save_model:
            return
        if safe_serialization:
            from safetensors.torch import save_file

            save_file({k: v.contiguous() for k, v in obj.items()}, f, metadata={"format": "pt"})
        else:
            torch.save(obj, f)
