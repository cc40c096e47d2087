"""What a user can choose about prepared loaders."""

from __future__ import annotations

from dataclasses import dataclass

from anydevice.arguments import names_unknown_arguments

__all__ = ["DataLoaderConfiguration"]


@names_unknown_arguments
@dataclass
class DataLoaderConfiguration:
    """Choices for the loaders that an `Accelerator` prepares.

    Args:
        split_batches: each batch of the loader is cut among the processes; its size must be a
            multiple of their number. Otherwise each process gets whole batches in turn.
        dispatch_batches: only the main process reads the data and sends each process its batch.
            None means False, for iterable data sets too: every process then reads the data set
            and keeps its own part.
        even_batches: samples from the beginning of the epoch are repeated until all processes
            have equally many full batches; `gather_for_metrics` drops the repeated ones.
        use_seedable_sampler: accepted; shuffling is always a function of seed and epoch.
        data_seed: the seed of shuffling; None takes that of the sampler's or the loader's
            generator, else torch's initial seed, of the main process.
        non_blocking: copy batches to the device without waiting, from pinned memory
            (``pin_memory=True`` in the loader) where the device can.
        use_stateful_dataloader: loaders are torchdata's `StatefulDataLoader`, and loading a
            checkpoint makes the next iteration go on where it was saved.

    Example:
        >>> from anydevice import Accelerator, DataLoaderConfiguration
        >>> configuration = DataLoaderConfiguration(split_batches=True)
        >>> Accelerator(cpu=True, dataloader_config=configuration).split_batches
        True
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
