"""Training: `Accelerator` and what it makes of models, optimizers, loaders and schedulers."""

from anydevice.training.accelerator import Accelerator
from anydevice.training.compiling import TorchDynamoPlugin
from anydevice.training.deepspeeding import DeepSpeedSchedulerWrapper
from anydevice.training.gradients import GradientAccumulationPlugin, GradientState
from anydevice.training.optimizer import AcceleratedOptimizer
from anydevice.training.profiling import ProfileKwargs
from anydevice.training.project import ProjectConfiguration
from anydevice.training.scheduler import AcceleratedScheduler
from anydevice.training.state import AcceleratorState

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AcceleratorState",
    "DeepSpeedSchedulerWrapper",
    "GradientAccumulationPlugin",
    "GradientState",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
]
