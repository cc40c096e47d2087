"""Running out of memory: trying with smaller batches, and giving memory back."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

from anydevice import registry
from anydevice.backend import DeviceBackend
from anydevice.errors import DoesNotFitError, OptionError

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "release_memory",
    "should_reduce_batch_size",
]


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate a function so that it runs with the largest batch size for which memory suffices.

    The function's first parameter is the batch size; callers leave it out. Each time that it runs
    out of a device's memory, memory is given back and the function is called again with less.

    Args:
        function: what to decorate.
        starting_batch_size: the first try.
        reduce_batch_size_fn: called without arguments, returns the next size; by default a size
            becomes nine tenths of itself.

    Raises:
        OptionError: ``starting_batch_size`` is below 1; or ``reduce_batch_size_fn`` does not
            reduce.
        TypeError: a caller gave the batch size.
        DoesNotFitError: memory does not suffice for one sample.

    Example:
        >>> from anydevice import find_executable_batch_size
        >>> @find_executable_batch_size(starting_batch_size=16)
        ... def train(batch_size, model):
        ...     return f"{model} with {batch_size}"
        >>> train("a model")
        'a model with 16'
    """
    if starting_batch_size < 1:
        raise OptionError(f"starting_batch_size={starting_batch_size}: give 1 or more")
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _refuse_batch_size(function, args, kwargs)
        batch_size = starting_batch_size
        while True:
            clear_device_cache(garbage_collection=True)
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Outside of the handler: the error's frames held the tensors of the failed try.
            batch_size = _next(batch_size, reduce_batch_size_fn)

    return run


def _next(batch_size: int, reduce: Callable[[], int] | None) -> int:
    smaller = int(batch_size * 0.9) if reduce is None else reduce()
    if smaller >= batch_size:
        raise OptionError(
            f"reduce_batch_size_fn returned {smaller} after {batch_size}: it must return less"
        )
    if smaller < 1:
        raise DoesNotFitError("No executable batch size found, reached zero.")
    return smaller


def _refuse_batch_size(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """See that the caller has left room for the batch size."""
    signature = inspect.signature(function)
    first = next(iter(signature.parameters), "")
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"{name} gets its first argument ({first!r}, the batch size) from "
            f"find_executable_batch_size: leave it out of the call ({error})"
        ) from None


def release_memory(*objects: Any) -> list[None]:
    """Give memory back: assign the result to the names of ``objects``, which frees them.

    Until then the caller's names hold them; what was cached before is given back at once.

    Example:
        >>> from anydevice.utils import release_memory
        >>> a, b = [0] * 1000, [0] * 1000
        >>> a, b = release_memory(a, b)
        >>> a is b is None
        True
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the cached memory of all accelerators back.

    Args:
        garbage_collection: collect garbage first.

    Example:
        >>> from anydevice.utils import clear_device_cache
        >>> clear_device_cache()
    """
    if garbage_collection:
        gc.collect()
    for backend in _backends():
        if backend.capabilities.caching_allocator:
            for index in range(backend.device_count()):
                backend.empty_cache(index)


def should_reduce_batch_size(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, is a lack of memory of a device or the host.

    Example:
        >>> from anydevice.utils import should_reduce_batch_size
        >>> should_reduce_batch_size(RuntimeError("a shape does not match"))
        False
    """
    while error is not None:
        if any(backend.is_out_of_memory(error) for backend in _backends()):
            return True
        error = error.__cause__
    return False


def _backends() -> list[DeviceBackend]:
    return [
        record.backend
        for record in registry.list_backends()
        if record.status == "available" and record.backend is not None
    ]
