"""Ctrl-C on a terminal, as a person presses it."""

import contextlib
import os
import pty
import subprocess
import sys

from .conftest import HANGS, is_gone, wait_for

#: A shell's part: the terminal becomes that of the process's session, then the program starts.
START = """
import fcntl, os, sys, termios

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "anydevice", "launch", *sys.argv[1:]])
"""


def _rest(leader):
    """What was written to the terminal; Linux ends it with an error once nobody has it open."""
    text = b""
    with contextlib.suppress(OSError):
        while part := os.read(leader, 4096):
            text += part
    return text.decode()


def test_ctrl_c_on_a_terminal_ends_all_with_one_message(launcher):
    leader, follower = pty.openpty()
    words = ["--cpu", "--num_processes", "2", launcher.script(HANGS), "willing"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, *words],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    records = launcher.records
    wait_for(lambda: len(list(records.iterdir())) == 2, "the processes never came")
    os.write(leader, b"\x03")
    assert process.wait(timeout=200) == 130
    for file in records.iterdir():
        wait_for(lambda pid=int(file.name): is_gone(pid), "a process lives on")
    said = _rest(leader)
    os.close(leader)
    lines = [line for line in said.replace("^C", "").splitlines() if line]
    assert len(lines) == 1, said
    assert "ending the script's processes" in lines[0]
