"""The reference's import path for DeepSpeed. No logic here."""

from anydevice.utils import (
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    DummyScheduler,
    HfDeepSpeedConfig,
)

__all__ = ["DeepSpeedSchedulerWrapper", "DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"]
