"""Loaders for several processes: sharded or dispatched, even or uneven, resumed mid-epoch.

`prepare_data_loader` is where a loader comes in; `current_iteration` is how the rest of the house
learns whether its last batch is out.
"""

from anydevice.data.active import Iteration, active_iterations, current_iteration
from anydevice.data.configuration import DataLoaderConfiguration
from anydevice.data.dispatching import DataLoaderDispatcher, batch_length
from anydevice.data.iterable import IterableDatasetShard
from anydevice.data.loaders import DataLoaderShard, PreparedLoader
from anydevice.data.preparing import prepare_data_loader, skip_first_batches
from anydevice.data.rounds import Division, Note, Round
from anydevice.data.samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler

__all__ = [
    "BatchSamplerShard",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "Division",
    "IterableDatasetShard",
    "Iteration",
    "Note",
    "PreparedLoader",
    "Round",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "active_iterations",
    "batch_length",
    "current_iteration",
    "prepare_data_loader",
    "skip_first_batches",
]
