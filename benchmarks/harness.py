"""Measuring two ways to do one thing: in pairs, each in a fresh process, in turns.

A machine's speed drifts; the ratio of two runs that follow each other does not. So each pair is run
back to back, first one side then the other, the order changing from pair to pair, and what is
reported is the median of the pairs' ratios. One pair before them warms caches and is not counted.

A benchmark module has functions ``case(side, size, folder) -> {metric: number}``, registered with
`Suite.case`, and ends in ``suite.main()``. Each call runs in a process of its own, which the
harness starts as ``python -m benchmarks.NAME --worker ...``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS, PEER, LIMIT = "ours", "peer", "limit"

#: Does one side of a case in its own process, and returns its numbers.
Work = Callable[[str, str, Path], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Metric:
    """One number of a case.

    Attributes:
        name: key in what the work returns.
        label: how the table names it.
        unit: ``s``, ``B`` or ``x``.
        target: the largest ratio ours/peer that is wanted, or None.
        most: the largest value of ours that is wanted, or None.
        limit: key of the limit's number to compare with, or None.
    """

    name: str
    label: str
    unit: str = "s"
    target: float | None = None
    most: float | None = None
    limit: str | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured."""

    name: str
    title: str
    work: Work
    metrics: tuple[Metric, ...]
    sides: tuple[str, ...] = (OURS, PEER)


class Suite:
    """The cases of one benchmark module."""

    def __init__(self, module: str, prepare: Callable[[str, Path], None]) -> None:
        self.module = module
        self.prepare = prepare
        self.cases: dict[str, Case] = {}

    def case(
        self, title: str, *metrics: Metric, sides: tuple[str, ...] = (OURS, PEER)
    ) -> Callable[[Work], Work]:
        """Register the decorated function as a case."""

        def register(work: Work) -> Work:
            name = work.__name__
            self.cases[name] = Case(name, title, work, metrics, sides)
            return work

        return register

    def main(self, arguments: list[str] | None = None) -> int:
        """Run what the command line asks for; returns the exit code."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.module}")
        parser.add_argument(
            "--quick", action="store_true", help="tiny sizes, one pair: a smoke test"
        )
        parser.add_argument("--pairs", type=int, help="pairs to measure (default 5; quick: 1)")
        parser.add_argument("--only", nargs="*", help=f"of {', '.join(self.cases)}")
        parser.add_argument(
            "--folder", help="where checkpoints are made (default: a temporary one)"
        )
        parser.add_argument("--strict", action="store_true", help="exit 1 when a target is missed")
        parser.add_argument("--worker", help=argparse.SUPPRESS)
        options = parser.parse_args(arguments)
        if options.worker:
            self._worker(json.loads(options.worker))
            return 0
        names = options.only or list(self.cases)
        size = "quick" if options.quick else "full"
        pairs = options.pairs or (1 if options.quick else 5)
        with tempfile.TemporaryDirectory(prefix="anydevice-bench-", dir=options.folder) as folder:
            self.prepare(size, Path(folder))
            rows = [
                row
                for name in names
                for row in self._measure(self.cases[name], size, pairs, Path(folder))
            ]
        print(_table(rows, self._command(options), pairs))
        return int(options.strict and any(row.verdict == "no" for row in rows))

    def _command(self, options: argparse.Namespace) -> str:
        only = f" --only {' '.join(options.only)}" if options.only else ""
        return f"python -m {self.module}{' --quick' if options.quick else ''}{only}"

    def _worker(self, task: dict[str, str]) -> None:
        work = self.cases[task["case"]].work
        numbers = work(task["side"], task["size"], Path(task["folder"]))
        print("\n" + json.dumps(dict(numbers)), flush=True)

    def _run(self, case: Case, side: str, size: str, folder: Path) -> dict[str, float]:
        """One side of one pair, in a process of its own."""
        task = {"case": case.name, "side": side, "size": size, "folder": str(folder)}
        done = subprocess.run(
            [sys.executable, "-m", self.module, "--worker", json.dumps(task)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"},
        )
        if done.returncode != 0:
            raise RuntimeError(f"{case.name} ({side}) failed:\n{done.stdout}\n{done.stderr}")
        numbers: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
        return numbers

    def _measure(self, case: Case, size: str, pairs: int, folder: Path) -> list[Row]:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in case.sides}
        for number in range(-1 if size == "full" else 0, pairs):
            order = case.sides if number % 2 == 0 else case.sides[::-1]
            for side in order:
                print(f"{case.name}: {side}, pair {number + 1} of {pairs}", file=sys.stderr)
                numbers = self._run(case, side, size, folder)
                if number >= 0:
                    runs[side].append(numbers)
        return [_row(case, metric, runs) for metric in case.metrics]


# ---------------------------------------------------------------------- numbers and their table


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: str
    metric: Metric
    ours: float | None
    peer: float | None
    ratio: float | None
    limit: float | None

    @property
    def verdict(self) -> str:
        """Whether what is wanted was reached: yes, no, or nothing is wanted."""
        wanted = [
            (self.metric.target, self.ratio),
            (self.metric.most, self.ours),
        ]
        checks = [value <= most for most, value in wanted if most is not None and value is not None]
        return "" if not checks else "yes" if all(checks) else "no"


def _row(case: Case, metric: Metric, runs: Mapping[str, list[dict[str, float]]]) -> Row:
    def median(side: str, key: str | None) -> float | None:
        values = [run[key] for run in runs.get(side, []) if key in run]
        return statistics.median(values) if values else None

    pairs = list(zip(runs.get(OURS, []), runs.get(PEER, []), strict=False))
    ratios = [
        ours[metric.name] / peer[metric.name]
        for ours, peer in pairs
        if metric.name in ours and peer.get(metric.name)
    ]
    return Row(
        case.title,
        metric,
        median(OURS, metric.name),
        median(PEER, metric.name),
        statistics.median(ratios) if ratios else None,
        median(LIMIT, metric.limit),
    )


def _table(rows: list[Row], command: str, pairs: int) -> str:
    lines = [
        f"`{command}` on {_machine()}; medians of {pairs} pair{'s' * (pairs > 1)}.",
        "",
        "| what | ours | peer | ours/peer | wanted | reached | limit | ours/limit |",
        "| --- | ---: | ---: | ---: | ---: | :---: | ---: | ---: |",
    ]
    for row in rows:
        metric = row.metric
        wanted = [f"<= {metric.target:g}"] if metric.target is not None else []
        wanted += [f"ours <= {_show(metric.most, metric.unit)}"] if metric.most is not None else []
        over = row.ours / row.limit if row.ours is not None and row.limit else None
        cells = [
            f"{row.case}: {metric.label}",
            _show(row.ours, metric.unit),
            _show(row.peer, metric.unit),
            _show(row.ratio, ""),
            ", ".join(wanted),
            row.verdict,
            _show(row.limit, metric.unit),
            _show(over, ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _show(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "s":
        if value < 1e-3:
            return f"{value * 1e6:.1f} us"
        return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
    if unit == "B":
        return f"{value / 1e6:,.1f} MB" if value else "0"
    return f"{value:.3g}"


def _machine() -> str:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.system()} {platform.machine()}, {cores} cores, torch {torch.__version__}"


# ---------------------------------------------------------------------- for the cases


class Clock:
    """Called, it gives the seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start


def best_of(repeats: int, function: Callable[[], Any]) -> float:
    """The least seconds of several calls: what the machine can do when nothing is in the way."""
    times = []
    for _ in range(repeats):
        clock = Clock()
        function()
        times.append(clock())
    return min(times)


def drop_cached(paths: list[Path]) -> None:
    """Let the system forget the files' cached pages, so that the next read comes from the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
