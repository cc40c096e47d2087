"""``anydevice launch``: run a script in several processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from anydevice.errors import AnyDeviceError

__all__ = ["run_words"]

_USAGE = 2


def run_words(words: Sequence[str]) -> int:
    """Launch, or print what a launch would do.

    Returns:
        The script's exit code; 2 when the words or settings cannot be used, and nothing started.
    """
    from anydevice.launch.arguments import help_text, read_words

    try:
        read = read_words(words)
        if read.values.get("help") or read.values.get("help_all"):
            print(help_text(all_groups=bool(read.values.get("help_all"))))
            raise SystemExit(0)  # as argparse does for the other commands
        if read.script is None:
            print(
                "anydevice launch: the script is missing: anydevice launch [options] script.py",
                file=sys.stderr,
            )
            return _USAGE
        # Not at the top: a misspelled option does not wait for torch.
        from anydevice.launch.execute import execute
        from anydevice.launch.plan import make_plan
        from anydevice.launch.resolve import resolve

        plan = make_plan(resolve(read.values), read.script, read.arguments)
    except AnyDeviceError as error:
        print(f"anydevice launch: {error}", file=sys.stderr)
        return _USAGE
    settings = plan.settings
    if settings.get("dry_run"):
        print(json.dumps(plan.as_json(), indent=2) if settings.get("json") else plan.text())
        return 0
    if settings.config is not None and settings.config.left_aside:
        print(
            f"anydevice launch: without effect here, in {settings.config.path}: "
            f"{', '.join(settings.config.left_aside)}",
            file=sys.stderr,
        )
    for line in [] if settings.get("quiet") else settings.without_effect():
        print(f"anydevice launch: {line}", file=sys.stderr)
    return execute(plan)
