"""Profiling a part of a run with torch's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anydevice.arguments import names_unknown_arguments
from anydevice.errors import OptionError
from anydevice.handlers import KwargsHandler

__all__ = ["ProfileKwargs"]


@names_unknown_arguments
@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`.

    Args:
        activities: names such as "cpu" and device types; None is what torch takes by itself.
        schedule_option: arguments of `torch.profiler.schedule`.
        on_trace_ready: called with the profiler when a trace is there.
        record_shapes, profile_memory, with_stack, with_flops, with_modules: as torch has them.
        output_trace_dir: where each process writes ``profile_RANK.json``, for Chrome's viewer.

    Raises:
        OptionError: an activity that torch does not know; both ways of handing out the trace.

    Example:
        >>> from anydevice import ProfileKwargs
        >>> ProfileKwargs(activities=["cpu"], record_shapes=True).record_shapes
        True
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        if self.schedule_option and self.output_trace_dir:
            raise OptionError(
                "output_trace_dir writes the whole run's trace and schedule_option divides it: "
                "give on_trace_ready=torch.profiler.tensorboard_trace_handler(folder) instead"
            )

    def build(self) -> Any:
        """The profiler, not started."""
        import torch.profiler as profiler

        options: dict[str, Any] = {
            "on_trace_ready": self.on_trace_ready,
            "record_shapes": self.record_shapes,
            "profile_memory": self.profile_memory,
            "with_stack": self.with_stack,
            "with_flops": self.with_flops,
            "with_modules": self.with_modules,
        }
        if self.activities is not None:
            options["activities"] = [_activity(profiler, name) for name in self.activities]
        if self.schedule_option is not None:
            options["schedule"] = profiler.schedule(**self.schedule_option)
        return profiler.profile(**options)

    @contextlib.contextmanager
    def run(self, rank: int, wait: Callable[[], None]) -> Iterator[Any]:
        """Profile the context's body; then write the trace if it is asked for."""
        with self.build() as running:
            yield running
        if self.output_trace_dir is not None:
            folder = Path(self.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(folder / f"profile_{rank}.json"))
            wait()


def _activity(profiler: Any, name: str) -> Any:
    known = profiler.ProfilerActivity.__members__
    if name.upper() not in known:
        raise OptionError(f"activities: {name!r}; torch knows {', '.join(known).lower()}")
    return known[name.upper()]
