"""Megatron-LM as an engine: the adapter to Megatron-core's public interface.

`engine` is where to begin. What needs the package is imported when the engine is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anydevice.engines.megatron.engine import MegatronLMEngine

__all__ = ["MegatronLMEngine"]


def __getattr__(name: str) -> Any:
    if name == "MegatronLMEngine":
        from anydevice.engines.megatron.engine import MegatronLMEngine

        return MegatronLMEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
