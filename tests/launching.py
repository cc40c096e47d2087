"""Real processes for tests, started fast: they are forked from one that has torch imported.

    from launching import run_ranks

    def step(rank, size):          # at the top level of a file; its result is pickled
        return PartialState().process_index

    assert run_ranks(step, 2, "sim") == [0, 1]

Each rank has torchrun's variables in its environment, and nothing else started. On ``"sim"`` it has
as many simulated devices as there are ranks. A function in a file without imports of pytest starts
faster. Tests find this file since `tests/conftest.py` puts the folder on the path.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import io
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

__all__ = ["Failed", "free_port", "run_ranks"]


class Failed:
    """What a rank left that raised, was killed or hung.

    Attributes:
        error: the exception, where it could be brought over; else None.
        text: its traceback, and what the rank wrote to stderr.
    """

    def __init__(self, error, text):
        self.error = error
        self.text = text

    def __repr__(self):
        return f"Failed({self.error!r}):\n{self.text}"


def run_ranks(
    function, size, device_type="cpu", *args, timeout=60, check=True, environment=None, imports=()
):
    """Call ``function(rank, size, *args)`` in ``size`` processes, and return their results.

    Args:
        function: at the top level of its file.
        size: how many processes.
        device_type: ``"cpu"`` or ``"sim"``.
        *args: passed on; pickled.
        timeout: in seconds, after which those that still run are killed.
        check: raise where a rank fails; else its result is a `Failed`.
        environment: more variables; None takes one away.
        imports: modules that are imported once, before the ranks are forked, where each of them
            would import them: those of transformers take seconds. Other launches don't see them.
    """
    job = {
        "file": function.__code__.co_filename,
        "module": function.__module__,
        "function": function.__qualname__,
        "size": size,
        "device_type": device_type,
        "args": args,
        "timeout": timeout,
        "environment": environment or {},
        "imports": tuple(imports),
        "path": sys.path,
    }
    results = _server().ask(job)
    failed = {rank: r for rank, r in enumerate(results) if isinstance(r, Failed)}
    if check and failed:
        raise AssertionError("\n".join(f"rank {rank}: {r!r}" for rank, r in failed.items()))
    return results


def free_port():
    """A port that nobody uses now, and no other test meanwhile.

    Below those that the system gives to outgoing connections, and marked by a lock that this
    process holds: between this call and the port's use, nothing else takes it.
    """
    folder = Path(tempfile.gettempdir()) / f"anydevice-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        mark = (folder / str(port)).open("w")
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as place:
                place.bind(("", port))
        except OSError:
            mark.close()
            continue
        _ports.append(mark)
        return port


#: The locks of `free_port`, until this process ends.
_ports = []


# ---------------------------------------------------------------------- in the test's process


class _Server:
    def __init__(self):
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._owner = os.getpid()
        atexit.register(self.close)

    @property
    def is_usable(self):
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, job):
        with self._lock:
            self._process.stdin.write(base64.b64encode(pickle.dumps(job)) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise AssertionError("the process that forks ranks has died")
        return [_load(answer) for answer in pickle.loads(base64.b64decode(line))]

    def close(self):
        if self._owner == os.getpid():
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


_found = None


def _server():
    global _found
    if _found is None or not _found.is_usable:
        _found = _Server()
    return _found


def _load(answer):
    """A rank's answer: what it returned, or why it did not."""
    kind, value, text = answer
    if kind == "result":
        import torch

        return torch.load(io.BytesIO(value), weights_only=False)
    try:
        error = pickle.loads(value) if value else None
    except Exception as problem:  # noqa: BLE001 - an error of a class that cannot be brought over
        error, text = None, f"{text}\n(not brought over: {problem})"
    return Failed(error, text)


# ---------------------------------------------------------------------- in the one that forks

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
        helpers = {}
        for line in jobs:
            job = pickle.loads(base64.b64decode(line))
            imports = job.pop("imports", ())
            if not imports:
                answer = base64.b64encode(pickle.dumps(_run(job))) + b"\n"
            else:
                if imports not in helpers:
                    helpers[imports] = stack.enter_context(_helper(job["path"], imports))
                answer = helpers[imports](base64.b64encode(pickle.dumps(job)) + b"\n")
                assert answer, f"{imports} cannot be imported"
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
