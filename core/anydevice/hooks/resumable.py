"""Forwards that return before their work is done: generators, coroutines, asynchronous generators.

Such a forward runs in steps, perhaps on several threads and with other calls between two steps.
What a hook holds for the call (weights on a device) is held from the first step to the last. What
it sets for a thread (gradient mode, the current device) is set around each step, so that it does
not leak into the code that runs between two steps.
"""

from __future__ import annotations

import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

__all__ = ["RESUMABLE", "Call", "resume"]

#: Types of what a forward returns when its body has not run yet.
RESUMABLE = frozenset({types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType})


class Call(NamedTuple):
    """What a hook does around a forward that runs in steps.

    Attributes:
        hold: gives the context that lasts from the first step to the last.
        step: calls a function with a value: one step.
        finish: takes the forward's result and returns what the caller gets.
    """

    hold: Callable[[], AbstractContextManager[Any]]
    step: Callable[[Callable[[Any], Any], Any], Any]
    finish: Callable[[Any], Any]


def resume(body: Any, call: Call) -> Any:
    """Return an object of the same kind (see `RESUMABLE`) that runs ``body`` as ``call`` says."""
    if type(body) is types.AsyncGeneratorType:
        return _resume_async_generator(body, call)
    if type(body) is types.CoroutineType:
        return _resume_coroutine(body, call)
    return _resume_generator(body, call)


def _resume_generator(body: Any, call: Call) -> Generator[Any, Any, Any]:
    with call.hold():
        result = yield from _steps(body, call)
        return call.finish(result)


async def _resume_coroutine(body: Any, call: Call) -> Any:
    with call.hold():
        return call.finish(await _awaitable_steps(body, call))


async def _resume_async_generator(body: Any, call: Call) -> AsyncGenerator[Any, Any]:
    with call.hold():
        step, value = body.asend, None
        while True:
            try:
                item = await _awaitable_steps(step(value), call)
            except StopAsyncIteration:
                return
            try:
                value = yield item
                step = body.asend
            except GeneratorExit:
                await _awaitable_steps(body.aclose(), call)
                raise
            except BaseException as error:  # noqa: BLE001 - passed on to the body
                step, value = body.athrow, error


def _steps(body: Any, call: Call) -> Generator[Any, Any, Any]:
    """Run a generator, or whatever has ``send``, ``throw`` and ``close``; return its result."""
    step, value = body.send, None
    while True:
        try:
            item = call.step(step, value)
        except StopIteration as stop:
            return stop.value
        try:
            value = yield item
            step = body.send
        except GeneratorExit:
            body.close()
            raise
        except BaseException as error:  # noqa: BLE001 - passed on to the body
            step, value = body.throw, error


_awaitable_steps = types.coroutine(_steps)
