"""What ranks of `test_selftest.py` run."""

import contextlib
import io


def selftest(rank, size):
    """The script of ``anydevice test``; its exit code, and what it printed."""
    from anydevice.cli.selftest_script import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main()
    return code, said.getvalue()
