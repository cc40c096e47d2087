"""The process that ranks and interpreters of tests are forked from; `launching.py` starts it.

It reads jobs from its standard input and answers each with a line. It has torch imported, and all
of ours that ranks use, so a fork is ready in milliseconds.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib
import importlib.util
import io
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from launching import free_port

#: What ranks import, and starts nothing. Each optimizer imports dynamo.
_WARM = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "huggingface_hub.serialization",
    "psutil",
    "anydevice.distributed",
    "anydevice.training",
    "anydevice_backends.cpu",
    "anydevice_conformance.simulator",
)


def _serve():
    for name in _WARM:
        importlib.import_module(name)
    answers = os.dup(1)
    os.dup2(2, 1)  # what ranks print goes to stderr
    _answer(sys.stdin.buffer, answers)


def _answer(jobs, answers):
    """Do each job that comes, until no more come; those with `imports` in a process for these."""
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the pages of all that it looks at
    with contextlib.ExitStack() as stack, os.fdopen(answers, "wb") as file:
        helpers, path = {}, None
        for line in jobs:
            job = pickle.loads(base64.b64decode(line))
            imports = job.pop("imports", ())
            if imports:
                if imports not in helpers:
                    helpers[imports] = stack.enter_context(_helper(job["path"], imports))
                answer = helpers[imports](base64.b64encode(pickle.dumps(job)) + b"\n")
                assert answer, f"{imports} cannot be imported"
            else:
                if "listen" in job:
                    path = path or stack.enter_context(_listening())
                found = [path] if "listen" in job else _run(job)
                answer = base64.b64encode(pickle.dumps(found)) + b"\n"
            file.write(answer)
            file.flush()


@contextlib.contextmanager
def _helper(path, imports):
    """A fork of this process that has imported more, and asks it to do a job."""
    (their_jobs, jobs), (answers, their_answers) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(jobs)
            os.close(answers)
            sys.path[:] = path
            for name in imports:
                importlib.import_module(name)
            with os.fdopen(their_jobs, "rb") as lines:
                _answer(lines, their_answers)
        except BaseException:  # noqa: BLE001 - a fork must not go on where its parent does
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(their_jobs)
    os.close(their_answers)

    with os.fdopen(jobs, "wb") as asked, os.fdopen(answers, "rb") as answered:

        def ask(line):
            asked.write(line)
            asked.flush()
            return answered.readline()

        yield ask
    os.waitpid(pid, 0)


@contextlib.contextmanager
def _listening():
    """A fork of this process that forks for whoever connects to a socket, whose path this gives."""
    from anydevice_conformance import warm_server

    folder = tempfile.mkdtemp()  # a TemporaryDirectory ends where a fork ends
    path = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(writer)
                os.dup2(reader, 0)
                sys.stdin = os.fdopen(0)
                warm_server.serve(listener)
            finally:
                os._exit(0)
        os.close(reader)
        yield path
        os.close(writer)
        os.waitpid(pid, 0)
    shutil.rmtree(folder)


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


if __name__ == "__main__":
    _serve()
