"""Keeping a run's values: the trackers of an `Accelerator`."""

from __future__ import annotations

import contextlib
from typing import Any

from anydevice.errors import OptionError
from anydevice.training.core import AcceleratorCore
from anydevice.training.profiling import ProfileKwargs
from anydevice.training.project import ProjectConfiguration
from anydevice.training.tracking import GeneralTracker

__all__ = ["AcceleratorLogging"]


class AcceleratorLogging(AcceleratorCore):
    """The trackers of an `Accelerator`."""

    project_configuration: ProjectConfiguration
    log_with: list[Any]
    trackers: list[GeneralTracker]
    _handlers: dict[type, Any]
    _trigger: bool

    @property
    def project_dir(self) -> str | None:
        """The run's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        return self.project_configuration.logging_dir

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Begin a run with each tracker of ``log_with``; all processes call this.

        Args:
            project_name: of the run.
            config: its settings.
            init_kwargs: arguments for each tracker, by its name.

        Raises:
            OptionError: arguments for a tracker that there is not.
        """
        names = [each.name for each in self.log_with]
        unknown = [name for name in init_kwargs or {} if name not in names]
        if unknown:
            raise OptionError(
                f"init_kwargs for {unknown[0]!r}, and the trackers are {', '.join(names) or 'none'}"
            )
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
        for each in self.log_with:
            if each.main_process_only and not self.is_main_process:
                continue
            options = (init_kwargs or {}).get(each.name, {})
            tracker = (
                each
                if isinstance(each, GeneralTracker)
                else self._make(each, project_name, options)
            )
            tracker.start()
            self.trackers.append(tracker)
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(config)

    def _make(self, kind: type[Any], name: str, options: dict[str, Any]) -> GeneralTracker:
        if kind.requires_logging_directory:
            options = {"logging_dir": self.logging_dir, **options}
        made: GeneralTracker = kind(name, **options)
        return made

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name; with ``unwrap``, the object of the package beneath.

        On processes that have none, a tracker that keeps nothing.

        Raises:
            OptionError: no tracker of that name was asked for.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if name in [each.name for each in self.log_with] and not self.is_main_process:
            return _Nothing()
        have = ", ".join(tracker.name for tracker in self.trackers) or "none (init_trackers?)"
        raise OptionError(f"no tracker {name!r}: there are {have}")

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Have all trackers keep the values of a step; ``log_kwargs`` by the tracker's name."""
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def log_images(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Have all trackers that keep images keep these."""
        for tracker in self.trackers:
            if type(tracker).log_images is not GeneralTracker.log_images:
                tracker.log_images(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """End all trackers' runs, and the process group; all processes call this at the end."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
        self.state.destroy_process_group()

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Profile the context's body with torch's profiler, which the context gives."""
        handler = profile_handler or self._handlers.get(ProfileKwargs) or ProfileKwargs()
        context: contextlib.AbstractContextManager[Any] = handler.run(
            self.process_index, self.wait_for_everyone
        )
        return context

    def set_trigger(self) -> None:
        """Raise this process's flag, which `check_trigger` of all processes sees."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether some process raised its flag since the last call; all processes call this."""
        import torch

        raised = torch.tensor(int(self._trigger), device=self.device)
        self._trigger = False
        return bool(self.reduce(raised, "sum").item())


class _Nothing(GeneralTracker):
    """Stands for a tracker on processes that have none: whatever is asked of it does nothing."""

    name = "nothing"

    def __getattr__(self, name: str) -> Any:
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None: ...
