"""What can go wrong, as a tree.

::

    AnyDeviceError
    ├── BackendError              (RuntimeError)   a backend plugin is at fault
    │   └── DuplicateBackendError                  two packages claim one type
    ├── UnknownDeviceError        (ValueError)     a device that cannot be named, or is not here
    ├── BudgetError               (ValueError)     a memory budget: unreadable, or too small
    ├── DeviceMapError            (ValueError)     a device map that does not fit its model
    ├── ModelError                (ValueError)     a module or tensor that is not as needed
    │   └── UnplacedWeightError   (RuntimeError)   a weight is not on the device that needs it
    ├── DoesNotFitError           (RuntimeError)   weights do not fit where they were asked to go
    │   └── UnsupportedDtypeError (ModelError)     a device does not support a weight's dtype
    ├── CheckpointError           (ValueError)     a checkpoint that cannot be used
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   ├── CorruptCheckpointError                 bytes that contradict themselves
    │   ├── UnsafeCheckpointError                  reading would leave the folder or run code
    │   └── CheckpointMismatchError                keys, shapes or dtypes are not the model's
    ├── OffloadStoreError         (RuntimeError)   an offload folder that cannot be used
    │   └── DiskFullError         (OSError)        no room to write it
    ├── ProcessGroupError         (RuntimeError)   processes that cannot work together
    │   ├── MissingRankError      (TimeoutError)   some of them did not come, or died
    │   └── CollectiveMismatchError (ValueError)   they do not do the same, or with the same shapes
    ├── OptionError               (ValueError)     an argument that cannot be used
    └── MissingDependencyError    (ImportError)    an optional package is needed

Each also derives from the natural builtin, so code that catches ``ValueError`` or
``FileNotFoundError`` goes on working. A message says what, where (key, file, module or device)
and what to do.
"""

from __future__ import annotations


class AnyDeviceError(Exception):
    """Base of every error that anydevice raises on purpose.

    Example:
        >>> import anydevice
        >>> try:
        ...     anydevice.get_backend("no-such-device")
        ... except anydevice.AnyDeviceError as error:
        ...     print(type(error).__name__)
        UnknownDeviceError
    """


class BackendError(AnyDeviceError, RuntimeError):
    """A backend plugin is at fault; the message names its package."""


class DuplicateBackendError(BackendError):
    """Two packages claim one device type; the message names both and how to pick one."""


class UnknownDeviceError(AnyDeviceError, ValueError):
    """A device that cannot be named, or that this machine does not have."""


class BudgetError(AnyDeviceError, ValueError):
    """A memory budget that cannot be read, or into which nothing fits."""


class DeviceMapError(AnyDeviceError, ValueError):
    """A device map that does not fit the model it is for."""


class FrozenPlacementError(DeviceMapError, TypeError):
    """A `Placement` was edited in place."""


class ModelError(AnyDeviceError, ValueError):
    """A module, parameter or buffer that is not as the call needs it."""


class UnplacedWeightError(ModelError, RuntimeError):
    """A weight is not on the device that needs it, and could not be loaded there."""


class DoesNotFitError(AnyDeviceError, RuntimeError):
    """Weights do not fit where they were asked to go."""


class UnsupportedDtypeError(DoesNotFitError, ModelError):
    """A weight would be on a device that does not support its dtype.

    Planning, loading and dispatching raise it alike.
    """


class CheckpointError(AnyDeviceError, ValueError):
    """A checkpoint that cannot be used; the message names the file."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint where one was said to be."""


class CorruptCheckpointError(CheckpointError):
    """A file whose bytes contradict themselves."""


class UnsafeCheckpointError(CheckpointError):
    """Reading the file would leave its folder, or run code that it carries."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint's keys, shapes or dtypes are not the model's."""


class OffloadStoreError(AnyDeviceError, RuntimeError):
    """An offload folder that cannot be used."""


class DiskFullError(OffloadStoreError, OSError):
    """No room on the disk; the message gives bytes needed and bytes free."""


class ProcessGroupError(AnyDeviceError, RuntimeError):
    """Processes that cannot meet, or cannot work together."""


class MissingRankError(ProcessGroupError, TimeoutError):
    """Not all processes came within the time allowed, or one died; the message names which."""


class CollectiveMismatchError(ProcessGroupError, ValueError):
    """The processes make different calls, or bring different data; the message has each one's."""


class OptionError(AnyDeviceError, ValueError):
    """An argument that cannot be used; the message names it and says what is needed."""


class UnknownArgumentError(OptionError, TypeError):
    """A function does not take an argument of that name."""


class MissingDependencyError(AnyDeviceError, ImportError):
    """An optional package is needed; the message gives the command that installs it."""
