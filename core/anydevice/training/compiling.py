"""Compiling prepared models, whole or block by block."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from anydevice.arguments import names_unknown_arguments
from anydevice.engines import units_of
from anydevice.errors import OptionError
from anydevice.handlers import KwargsHandler
from anydevice.processes import DynamoBackend
from anydevice.text import says_yes

__all__ = ["TorchDynamoPlugin"]

_MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@names_unknown_arguments
@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile` for the models that are prepared.

    Args:
        backend: the compiler; None or "NO" does not compile.
        mode: "default", "reduce-overhead" or "max-autotune".
        fullgraph: one graph, or an error.
        dynamic: trace with changing shapes.
        options: for the compiler.
        disable: make `torch.compile` do nothing.
        use_regional_compilation: compile the model's repeated blocks, each once, rather than
            the whole model.

    Raises:
        OptionError: an unknown mode, or a mode together with options.

    Example:
        >>> from anydevice import TorchDynamoPlugin
        >>> TorchDynamoPlugin(backend="eager", fullgraph=True).fullgraph
        True
    """

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        prefix = "ACCELERATE_DYNAMO_"
        if self.backend is None:
            self.backend = os.environ.get(prefix + "BACKEND", "no")
        self.backend = DynamoBackend(str(getattr(self.backend, "value", self.backend)).upper())
        if self.mode is None:
            self.mode = os.environ.get(prefix + "MODE") or None
        for name, variable in (
            ("fullgraph", "USE_FULLGRAPH"),
            ("dynamic", "USE_DYNAMIC"),
            ("use_regional_compilation", "USE_REGIONAL_COMPILATION"),
        ):
            said = os.environ.get(prefix + variable)
            if getattr(self, name) is None and said is not None:
                setattr(self, name, says_yes(said))
        if self.mode is not None and self.mode not in _MODES:
            raise OptionError(f"mode={self.mode!r}: give one of {', '.join(_MODES)}")
        if self.mode not in (None, "default") and self.options:
            raise OptionError("torch.compile takes mode or options, not both")

    @property
    def active(self) -> bool:
        """Whether anything is compiled."""
        return bool(self.backend != DynamoBackend.NO)

    def for_torch(self) -> dict[str, Any]:
        """The arguments of `torch.compile`."""
        return {
            "backend": str(self.backend.value).lower(),
            "mode": self.mode,
            "fullgraph": bool(self.fullgraph),
            "dynamic": self.dynamic,
            "options": self.options,
            "disable": self.disable,
        }

    def compile(self, model: nn.Module) -> nn.Module:
        """The compiled model; with regional compilation the model itself, its blocks compiled."""
        if not self.active:
            return model
        if not self.use_regional_compilation:
            compiled: nn.Module = torch.compile(model, **self.for_torch())  # type: ignore[assignment]
            return compiled
        blocks = units_of(model)
        if not blocks:
            raise OptionError(
                "use_regional_compilation=True: the model has no repeated blocks. Leave it out"
            )
        for block in blocks:
            block.compile(**self.for_torch())
        return model
