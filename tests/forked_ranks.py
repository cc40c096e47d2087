"""The ranks of a launch, forked from a warm process (`forking.py`) for `launching.run_ranks`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from launching import free_port

__all__ = ["work"]


def work(connection):
    """Start the ranks that somebody asks for, and answer with what they return; never returns."""
    try:
        from forking import receive

        answers = _run(pickle.loads(receive(connection)))
        connection.sendall(pickle.dumps(answers))
    except BaseException:  # noqa: BLE001 - a fork must not go on where its parent does
        traceback.print_exc()
    finally:
        os._exit(0)


def _run(job):
    port = free_port()
    ranks = [_fork(job, rank, port) for rank in range(job["size"])]
    deadline = time.monotonic() + job["timeout"]
    threads = [threading.Thread(target=rank.wait, args=(deadline,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rank.answer() for rank in ranks]


class _Rank:
    def __init__(self, pid, answers, words):
        self.pid, self.answers, self.words = pid, answers, words
        self.hung = False
        self.data = b""

    def wait(self, deadline):
        timer = threading.Timer(max(deadline - time.monotonic(), 0.1), self._kill)
        timer.start()
        with os.fdopen(self.answers, "rb") as file:
            self.data = file.read()
        _, self.status = os.waitpid(self.pid, 0)
        timer.cancel()

    def _kill(self):
        self.hung = True
        os.kill(self.pid, signal.SIGKILL)

    def answer(self):
        self.words.seek(0)
        said = self.words.read()[-6000:]
        self.words.close()
        try:
            kind, value, text = pickle.loads(self.data)
        except Exception:  # noqa: BLE001 - it died before it could answer
            why = "hung, and was killed" if self.hung else f"ended with status {self.status}"
            return ("failed", b"", f"{why}\n{said}")
        return (kind, value, f"{text}\n{said}" if kind != "result" else "")


def _fork(job, rank, port):
    reader, writer = os.pipe()
    words = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `answer`
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Rank(pid, reader, words)
    os.close(reader)
    try:
        os.dup2(words.fileno(), 1)
        os.dup2(words.fileno(), 2)
        answer = _call(job, rank, port)
        with os.fdopen(writer, "wb") as file:
            file.write(pickle.dumps(answer))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _call(job, rank, port):
    """The body of a rank."""
    size = job["size"]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCH_CPP_LOG_LEVEL="ERROR",
    )
    os.environ.pop("ANYDEVICE_SIMULATOR", None)
    if job["device_type"] == "sim":
        os.environ["ANYDEVICE_SIMULATOR"] = f"devices={max(size, 2)},memory=256MiB"
    for name, value in job["environment"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value.format(rank=rank, size=size, port=port)
    sys.path[:] = job["path"]
    try:
        import torch

        torch.set_num_threads(1)
        if job["device_type"] != "cpu":
            from anydevice.registry import get_backend

            assert get_backend(job["device_type"]).device_count() >= size
        result = _function(job)(rank, size, *job["args"])
        buffer = io.BytesIO()
        torch.save(result, buffer)  # which brings over tensors of every dtype
        answer = ("result", buffer.getvalue(), "")
    except BaseException as error:  # noqa: BLE001 - brought to the test
        buffer = io.StringIO()
        traceback.print_exc(file=buffer)
        try:
            value = pickle.dumps(error.with_traceback(None))
        except Exception:  # noqa: BLE001 - see `_load`
            value = b""
        answer = ("failed", value, buffer.getvalue())
    _leave()
    return answer


def _leave():
    from anydevice.processes import PartialState

    with contextlib.suppress(Exception):
        if PartialState._shared_state:
            PartialState().destroy_process_group()
        elif __import__("torch").distributed.is_initialized():
            __import__("torch").distributed.destroy_process_group()


def _function(job):
    path = Path(job["file"])
    sys.path.insert(0, str(path.parent))
    # By the name that the test knows it by, so that what its classes make can be brought back.
    spec = importlib.util.spec_from_file_location(job["module"], path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = module
    for part in job["function"].split("."):
        found = getattr(found, part)
    return found
