"""``torch.distributed.run``, with the script's exit code and one line on what failed.

torch's own program prints two tracebacks of itself when a script fails, and exits with 1 whatever
the script's code was. This runs it and translates its end.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from anydevice.launch.worker import FAILED, REPORT_FOLDER
from anydevice.text import says_yes

__all__ = ["main"]

#: Set by ``--quiet``.
QUIET: Final = "ANYDEVICE_LAUNCH_QUIET"


def main(words: list[str]) -> int:
    """Run ``torch.distributed.run`` with these arguments.

    Returns:
        The exit code of the first process that failed, 128 and the signal's number for one that a
        signal ended; 0 when all went well.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    debug = says_yes(os.environ.get("ACCELERATE_DEBUG_MODE", ""))
    if not debug:  # its warnings and errors say again what the script has said
        logging.disable(logging.ERROR)
    try:
        run(words)
    except ChildFailedError as failed:
        return _report(failed.failures)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if debug:
            raise
        print(f"anydevice launch: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _report(failures: Mapping[int, Any]) -> int:
    """Say which process failed first, and return its exit code."""
    rank, code = _first(failures)
    failure = failures[rank]
    if not os.environ.get(QUIET):
        how = f"exited with code {code}"
        if code < 0:
            how = f"was ended by signal {-code} ({_signal_name(-code)})"
            if -code == signal.SIGKILL:
                how += ", as the system does when memory runs out"
        more = sum(f.exitcode != -signal.SIGTERM for f in failures.values()) - 1
        others = f"; {more} more failed" if more > 0 else ""
        print(
            f"anydevice launch: rank {rank} (local rank {failure.local_rank}, pid {failure.pid}) "
            f"{how}{others}.",
            file=sys.stderr,
        )
    return code if code > 0 else 128 - code


def _first(failures: Mapping[int, Any]) -> tuple[int, int]:
    """The rank that failed first, and its code: one that a signal ended, else one that says so.

    What a process says counts more than how it ended: the launcher may have ended it meanwhile.
    """
    by_signal = [r for r, f in failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    if by_signal:
        return by_signal[0], int(failures[by_signal[0]].exitcode)
    folder = os.environ.get(REPORT_FOLDER)
    reports = Path(folder).glob(f"{FAILED}-*") if folder else ()
    last = max(reports, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    said = last.read_text(encoding="utf-8").split() if last is not None else []
    if len(said) == 2 and int(said[0]) in failures:  # fewer: it was ended while it wrote
        return int(said[0]), int(said[1])
    rank = min(failures, key=lambda r: (failures[r].timestamp, r))
    return rank, int(failures[rank].exitcode)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
