"""Models that one process cannot hold: over several processes, of one machine or more.

`load_pipeline` gives each process some of a model's blocks; `load_tensor_parallel` gives each a
part of every layer.
"""

from __future__ import annotations

from anydevice.distributed.divided import load_tensor_parallel
from anydevice.distributed.pipelines import PipelineStageInfo, load_pipeline
from anydevice.distributed.stages import Stage

__all__ = ["PipelineStageInfo", "Stage", "load_pipeline", "load_tensor_parallel"]
