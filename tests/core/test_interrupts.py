"""Work that no interrupt stops half-way."""

import contextvars
import ctypes
import gc
import threading
import time
import weakref

import pytest
import torch

from anydevice import interrupts
from anydevice.interrupts import Interrupted, check, stopper, uninterrupted


def interrupt(thread):
    """Raise KeyboardInterrupt in a thread, at whatever instruction it is."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
    )


def test_it_returns_and_raises_what_the_work_does():
    assert uninterrupted(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 // 0)
    with pytest.raises(SystemExit):
        uninterrupted(lambda: (_ for _ in ()).throw(SystemExit(2)))


def test_the_callers_context_is_there_and_its_torch_modes_are_not():
    variable = contextvars.ContextVar("variable")
    variable.set(7)
    with torch.inference_mode():
        value, tensor = uninterrupted(lambda: (variable.get(), torch.ones(2)))
    assert value == 7
    assert not tensor.is_inference()


def test_a_nested_call_is_in_the_same_thread():
    threads = uninterrupted(lambda: (threading.get_ident(), uninterrupted(threading.get_ident)))
    assert threads[0] == threads[1] != threading.get_ident()


def test_an_interrupt_waits_until_the_work_has_cleaned_up():
    begun, steps, caught = threading.Event(), [], []

    def work():
        try:
            begun.set()
            while True:
                check()
                time.sleep(0.001)
        except Interrupted as stopped:
            steps.append("stopped")
            stopped.args = ("half done",)
            raise
        finally:
            steps.append("cleaned up")

    def call():
        try:
            uninterrupted(work)
        except KeyboardInterrupt as error:
            steps.append("raised")
            caught.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(60)
    interrupt(caller)
    caller.join(60)
    assert steps == ["stopped", "cleaned up", "raised"]
    assert caught[0].args == ("half done",)


def test_work_that_does_not_check_is_finished_first():
    begun, go, steps = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        assert go.wait(60)
        steps.append("finished")

    def call():
        with pytest.raises(KeyboardInterrupt):
            uninterrupted(work)
        steps.append("raised")

    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(60)
    interrupt(caller)
    go.set()
    caller.join(60)
    assert steps == ["finished", "raised"]


def test_a_second_interrupt_does_not_wait(monkeypatch):
    monkeypatch.setattr(interrupts, "_LOOK", 0.01)
    begun, go, raised = threading.Event(), threading.Event(), threading.Event()

    def call():
        with pytest.raises(KeyboardInterrupt):
            uninterrupted(lambda: (begun.set(), go.wait(60)))
        raised.set()

    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(60)
    while not raised.wait(0.02):
        interrupt(caller)
    go.set()
    caller.join(60)


def test_helper_threads_of_the_work_can_ask():
    def work():
        must_stop, answers = stopper(), []
        thread = threading.Thread(target=lambda: answers.append(must_stop()))
        thread.start()
        thread.join()
        return answers

    assert uninterrupted(work) == [False]
    assert stopper()() is False  # outside of any work
    check()


def test_a_kept_error_keeps_no_tensor():
    alive = []

    def inner():
        tensor = torch.ones(10)
        alive.append(weakref.ref(tensor))
        raise ValueError("inner")

    def work():
        tensor = torch.ones(10)
        alive.append(weakref.ref(tensor))
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("outer") from error

    with pytest.raises(RuntimeError, match="outer") as kept:
        uninterrupted(work)
    assert [found() for found in alive] == [None, None]
    assert isinstance(kept.value.__cause__, ValueError)


class Failure(Exception):
    pass


def fail():
    raise Failure


def test_neither_a_result_nor_an_error_waits_for_a_collection():
    gc.disable()
    try:
        tensor = uninterrupted(lambda: torch.ones(3))
        found = weakref.ref(tensor)
        del tensor
        assert found() is None
        error = None
        try:
            uninterrupted(fail)
        except Failure as caught:
            error = weakref.ref(caught)
        assert error() is None
    finally:
        gc.enable()
