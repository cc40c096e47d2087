"""Warm processes: what tests start is forked from one that has imported all it needs.

They are a tree, one for the whole run of pytest, which all its workers use: the first has torch,
the next one what ranks import, others what a file of tests asks for besides. Each is made when it
is first wanted, as a fork of the one before, and listens at sockets in a folder: for ranks
(`launching.py`), for interpreters (`warm.py`, `WarmPython`), and for who wants a process with more
imports. Each connection is one job in a fork of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

__all__ = ["RANKS", "TRANSFORMERS", "ask", "node", "receive", "start"]

#: What ranks import, and starts nothing (each optimizer imports dynamo); `a:b` is called, too.
RANKS = (
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "huggingface_hub.serialization",
    "psutil",
    "torch.utils.serialization",
    "anydevice.distributed",
    "anydevice.engines.ddp",
    "anydevice.loading.distributed",
    "anydevice.pretrained",
    "anydevice.training.checkpoints.fsdp_files",
    "anydevice.training.local_sgd",
    "anydevice.utils",
    "anydevice.engines:list_engines",  # reads once what packages offer
    "anydevice_backends.cpu",
    "anydevice_backends.cuda",
    "anydevice_backends.mlu",
    "anydevice_backends.mps",
    "anydevice_backends.npu",
    "anydevice_backends.xpu",
    "anydevice_conformance.simulator.backend",
)
#: What all who use transformers import.
TRANSFORMERS = (
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
#: Says to the workers of pytest where the tree of their run is.
_VARIABLE = "_ANYDEVICE_TEST_FORKS"


# ---------------------------------------------------------------------- in a test's process


def start():
    """Start the tree for this process and those that inherit its environment."""
    os.environ[_VARIABLE] = _root()


def node(*chain):
    """The folder of the process that has imported torch, and each of some lists of modules."""
    folder = os.environ.get(_VARIABLE) or _root()
    for modules in chain:
        if modules:
            with connect(folder, "nodes") as connection:
                connection.sendall(pickle.dumps(tuple(modules)))
                connection.shutdown(socket.SHUT_WR)
                folder = receive(connection).decode()
    return folder


def connect(folder, kind):
    """A connection to a process of the tree."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{folder}/{kind}")
    return connection


def ask(folder, kind, job):
    """What a job returns that a process of the tree does."""
    with connect(folder, kind) as connection:
        connection.sendall(pickle.dumps(job))
        connection.shutdown(socket.SHUT_WR)
        answer = receive(connection)
    assert answer, f"the process that forks {kind} has died"
    return pickle.loads(answer)


_found = None
_finding = threading.Lock()


def _root():
    global _found
    with _finding:  # two launches at once start one
        if _found is None or _found.owner != os.getpid() or _found.process.poll() is not None:
            _found = _Root()
        return _found.folder


class _Root:
    def __init__(self):
        self.owner = os.getpid()
        self.folder = tempfile.mkdtemp()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # that is for the forks to do
        self.process = subprocess.Popen(
            [sys.executable, __file__, self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.process.stdout.readline()  # it listens
        atexit.register(self.close)

    def close(self):
        if self.owner == os.getpid():
            self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
            shutil.rmtree(self.folder)


def receive(connection):
    """All that comes, until the other side says no more."""
    parts = []
    while part := connection.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


# ---------------------------------------------------------------------- in those that fork


class _Node:
    """A process that has imported some modules, once somebody asks it for something."""

    def __init__(self, folder, modules):
        self.folder = folder
        self.modules = modules
        self.children = {}
        self.pids = []
        self.listeners = {kind: socket.socket(socket.AF_UNIX) for kind in self.kinds()}
        for kind, listener in self.listeners.items():
            listener.bind(f"{folder}/{kind}")
            listener.listen(64)

    def kinds(self):
        """What does a job of each kind, in a fork that it never leaves."""
        import forked_programs
        import forked_ranks

        return {
            "nodes": None,
            "ranks": forked_ranks.work,
            "programs": forked_programs.module,
            "python": forked_programs.python,
        }

    def serve(self):
        """Do what is asked, until standard input ends."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: who started it ends it
        if not self._wait():
            return
        gc.disable()  # what is imported stays
        with _quiet():
            for name in self.modules:
                module, _, function = name.partition(":")
                found = importlib.import_module(module)
                if function:
                    getattr(found, function)()
        gc.freeze()  # a collection in a fork would copy the pages of all that it looks at
        gc.enable()
        signal.signal(signal.SIGCHLD, _reap)
        while ready := self._wait():
            for kind in ready:
                self._accept(kind)
        for pid in self.pids:  # they end for the same reason
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _wait(self):
        """The kinds that somebody has connected to; none at the end of standard input."""
        sources = [sys.stdin, *self.listeners.values()]
        ready = select.select(sources, [], [])[0]
        if sys.stdin in ready:
            return []
        return [kind for kind, listener in self.listeners.items() if listener in ready]

    def _accept(self, kind):
        connection = self.listeners[kind].accept()[0]
        if kind == "nodes":
            self._child(connection)
        elif os.fork() == 0:
            for listener in self.listeners.values():
                listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if kind != "programs":  # whose keeper stays when Ctrl-C ends them
                signal.signal(signal.SIGINT, signal.default_int_handler)
            self.kinds()[kind](connection)
        connection.close()

    def _child(self, connection):
        modules = pickle.loads(receive(connection))
        if modules not in self.children:
            folder = f"{self.folder}/{len(self.children)}"
            os.mkdir(folder)
            self.children[modules] = _Node(folder, modules)
            if pid := os.fork():
                self.pids.append(pid)
            else:
                connection.close()
                for listener in self.listeners.values():
                    listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    self.children[modules].serve()
                finally:
                    os._exit(0)
            for listener in self.children[modules].listeners.values():
                listener.close()
        connection.sendall(self.children[modules].folder.encode())


@contextlib.contextmanager
def _quiet():
    """Keep what packages say of themselves as they are imported, unless that fails."""
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as words:
        os.dup2(words.fileno(), 2)
        try:
            yield
        except BaseException:
            words.seek(0)
            os.write(stderr, words.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _main():
    root = _Node(sys.argv[1], ())
    print("listening", flush=True)
    os.dup2(2, 1)  # what forks print goes to stderr
    gc.disable()  # what is imported stays
    import torch

    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    torch.set_num_threads(1)
    torch.ones(1).sum()  # what torch sets up late is set up once
    root.serve()


if __name__ == "__main__":
    _main()
