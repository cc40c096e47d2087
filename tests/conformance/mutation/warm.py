"""Trying many broken backends on the suite in one warm process: each in a fork of its own.

The suite is imported and collected once. For each mutant the process forks; the child puts the
mutant in place, runs the checks that it was told to and writes what they ended as to a pipe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import io
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
from mutants.gallery import find, installed

from anydevice import registry
from anydevice_conformance import children, simulator
from anydevice_conformance.catalogue import load_catalogue
from anydevice_conformance.inprocess import _Bring
from anydevice_conformance.items import check_name
from anydevice_conformance.journal import Journal
from anydevice_conformance.runner import pytest_arguments
from anydevice_conformance.session import Session
from anydevice_conformance.subject import Subject
from mutation import forked

__all__ = ["BIG_MACHINE", "MACHINE", "Outcome", "Trial", "run_trials"]

#: What checks import as they run. The parent imports it once; else each fork does, for seconds.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.generation.utils",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
)

#: Checks that come before others of their paragraph, which take far longer.
_SHORT = ("test_DTY_019_again",)

#: What the mutants are tried on.
MACHINE: dict[str, Any] = {"devices": 2, "memory": ["64MiB", "96MiB"], "mode": "lazy"}
#: Pages that nothing is written to cost neither memory nor time.
BIG_MACHINE: dict[str, Any] = {"devices": 1, "memory": "5GiB", "mode": "lazy", "poison": False}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A mutant, or None for the right backend, and the checks that it is tried on.

    Attributes:
        mutant: its name.
        choose: says of a check's name how early it is run; None for not at all.
        first: stop at the first failure.
        examples: how many of each law are tried; None for its ordinary number.
        seconds: after which it is taken to hang.
        operators: of the usual operators only those are tried that have this in their names.
    """

    mutant: str | None
    choose: Callable[[str], int | None]
    first: bool = True
    examples: int | None = None
    seconds: float = 120.0
    operators: str | None = None


@dataclasses.dataclass
class Outcome:
    """What became of a trial.

    Attributes:
        mutant: its name.
        events: the journal's.
        end: ``"finished"``, ``"crashed"`` or ``"hung"``.
        seconds: how long it took.
        cpu: seconds of processor time, with those of the processes that it waited for.
    """

    mutant: str | None
    events: list[dict[str, Any]]
    end: str
    seconds: float
    cpu: float

    def results(self, *statuses: str) -> list[dict[str, Any]]:
        """The results with one of these statuses."""
        found = [e for e in self.events if e["event"] == "result"]
        return [e for e in found if e["status"] in statuses]

    @property
    def flags(self) -> list[dict[str, Any]]:
        """What was flagged."""
        return [e for e in self.events if e["event"] == "flag"]

    @property
    def killed_by(self) -> str | None:
        """What found the fault: a check, a crash or a hang; None where nothing did."""
        failed = self.results("failed", "error")
        if failed:
            return str(failed[0]["check"])
        if self.end != "finished":
            started = [e["check"] for e in self.events if e["event"] == "start"]
            return f"{started[-1] if started else 'start'} ({self.end})"
        return None


class _Loop:
    """Takes the place of pytest's loop over the checks."""

    def __init__(
        self, session: Session, trials: Iterable[Trial], tell: Callable[[Outcome], object]
    ) -> None:
        self._session = session
        self._trials = trials
        self._tell = tell

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Fork for each trial."""
        for name in PRELOADED:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # a collection in a child would copy the pages of all that it looks at
        for trial in self._trials:
            self._tell(self._fork(session.items, trial))
        return True

    def _fork(self, items: list[pytest.Item], trial: Trial) -> Outcome:
        readable, writable = os.pipe()
        begin = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os.close(readable)
            os.setpgid(0, 0)
            self._in_child(items, trial, writable)
        os.close(writable)
        data, hung = _read(readable, trial.seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # and whatever it has started
        usage = os.wait4(pid, 0)[2]
        # A killed child that has said its last word has finished all the same.
        events = [json.loads(line) for line in data.splitlines() if line.endswith(b"}")]
        end = "finished" if events and events[-1]["event"] == "finish" else "crashed"
        seconds = time.perf_counter() - begin
        cpu = usage.ru_utime + usage.ru_stime
        return Outcome(trial.mutant, events, "hung" if hung else end, seconds, cpu)

    def _in_child(self, items: list[pytest.Item], trial: Trial, pipe: int) -> None:
        try:
            quiet = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(quiet, descriptor)
            with contextlib.ExitStack() as stack:
                if trial.mutant is not None:
                    stack.enter_context(installed(trial.mutant))
                stack.enter_context(mock.patch.object(children, "start", forked.start))
                if trial.operators is not None:
                    stack.enter_context(_only(trial.operators, items))
                self._run(items, trial, pipe)
                os.write(pipe, b'{"event": "finish"}\n')
                os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the child must not return
            words = {
                "event": "result",
                "check": "start",
                "status": "failed",
                "case": "",
                "message": f"{type(error).__name__}: {error}",
            }
            with contextlib.suppress(OSError):
                os.write(pipe, json.dumps(words).encode() + b'\n{"event": "finish"}\n')
        finally:
            os._exit(1)

    def _run(self, items: list[pytest.Item], trial: Trial, pipe: int) -> None:
        here = self._session.subject
        (record,) = [
            r
            for r in registry.list_backends()
            if r.device_type == here.type and r.backend is not None
        ]
        assert record.backend is not None
        self._session.subject = Subject(record, record.backend, here.quick)
        self._session.subject.shrinking = False  # that a fault shows is enough
        self._session.subject.count = trial.examples
        self._session.journal = _Piped(pipe)
        places = [(trial.choose(check_name(item)), item) for item in items]
        chosen = [p for p in places if p[0] is not None]
        chosen.sort(key=lambda place: place[0] or 0)
        todo = [item for _, item in chosen]
        for item, after in zip(todo, [*todo[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            last = self._session.journal.events[-1]
            if trial.first and last.get("status") in ("failed", "error"):
                return


def _only(words: str, items: list[pytest.Item]) -> contextlib.AbstractContextManager[Any]:
    """Have the check of the usual operators make these trials only, as it makes them among all."""
    (check,) = [i for i in items if check_name(i) == "test_DTY_019_usual_operators"]
    module = check.module  # type: ignore[attr-defined]
    every = module.usual_trials

    def some(subject: Subject, rounds: int) -> Iterator[Any]:
        return (trial for trial in every(subject, rounds) if words in trial.name)

    return mock.patch.object(module, "usual_trials", some)


class _Piped(Journal):
    """A journal whose lines go to a pipe."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self._pipe = pipe

    def write(self, event: str, **values: Any) -> None:
        """Add an event."""
        super().write(event, **values)
        os.write(self._pipe, json.dumps({"event": event, **values}).encode() + b"\n")


def _read(descriptor: int, seconds: float) -> tuple[bytes, bool]:
    """All that comes through a pipe, and whether time was up before its end."""
    deadline, data = time.monotonic() + seconds, b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.close(descriptor)
            return data, True
        piece = os.read(descriptor, 1 << 16)
        if not piece or data.endswith(b'"finish"}\n'):
            os.close(descriptor)
            return data, False
        data += piece
        if data.endswith(b'{"event": "finish"}\n'):
            os.close(descriptor)
            return data, False


@contextlib.contextmanager
def machine(options: dict[str, Any]) -> Iterator[None]:
    """A simulated machine, here and in child processes."""
    simulator.configure(**options)
    memory = options["memory"]
    text = memory if isinstance(memory, str) else ":".join(memory)
    words = f"devices={options['devices']},memory={text},mode={options['mode']}"
    with mock.patch.dict(os.environ, {simulator.ENVIRONMENT_VARIABLE: words}):
        yield
    simulator.configure()


def run_trials(
    trials: Iterable[Trial],
    *,
    base: str = "sim",
    options: dict[str, Any] | None = None,
    quick: bool = False,
    twice: bool = False,
    tell: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Try mutants of one base on one machine, one after the other.

    Args:
        trials: which, and on what.
        base: the device type whose backend they break.
        options: the simulated machine.
        quick: as ``certify --quick``.
        twice: take each check in another situation, too, as a whole ``certify`` does.
        tell: called with each outcome as it comes.
    """
    found: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        found.append(outcome)
        tell(outcome)

    with machine(options or MACHINE):
        right = registry.get_backend(base)
        (record,) = [r for r in registry.list_backends() if r.backend is right]
        session = Session(Subject(record, right, quick), Journal(), twice=twice)
        loop = _Loop(session, trials, note)
        arguments = [*pytest_arguments(), "--tb=no", "-panydevice_conformance.pytest_plugin"]
        arguments += ["-pno:faulthandler", "-pno:logging", "-pno:unraisableexception"]
        output = io.StringIO()
        with (
            mock.patch.dict(os.environ, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
            contextlib.redirect_stdout(output),
        ):
            os.environ.pop("PYTEST_ADDOPTS", None)
            code = pytest.main(arguments, plugins=[_Bring(session), loop])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {code!r}:\n{output.getvalue()[-2000:]}")
    return found


def checks_of(paragraph: str, check: str | None = None) -> Callable[[str], int | None]:
    """Chooses the checks of one paragraph, or a single one of them."""
    names = {c.name for c in load_catalogue().values() if c.paragraph == paragraph}
    if check is not None:
        names &= {check}
    return lambda name: (name not in _SHORT) if name in names else None


def base_of(name: str) -> str:
    """The device type whose backend a mutant breaks."""
    return find(name).base
