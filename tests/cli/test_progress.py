"""Progress bars: on a terminal only, and not where the environment says no."""

import contextlib
import fcntl
import io
import os
import pty
import select
import struct
import termios

import pytest

from anydevice import cli


def said_on_a_terminal(*commands):
    """What commands write to stderr where it is a terminal of 80 columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(follower, "w") as stream:
        with contextlib.redirect_stderr(stream):
            for words in commands:
                assert cli.main([str(word) for word in words]) == 0
        stream.flush()
        found = b""
        while select.select([leader], [], [], 0.2)[0]:
            found += os.read(leader, 65536)
    os.close(leader)
    return found.decode()


def merging(folder, target):
    return ["merge-weights", folder, target, "--max-shard-size", "50KB"]


def running(folder):
    return ["run", folder, "--max-memory", "cpu=1GiB"]


def test_a_bar_on_a_terminal(tiny_llama, tmp_path):
    assert "Writing" in said_on_a_terminal(merging(tiny_llama, tmp_path))


@pytest.mark.parametrize("word", ["0", "off", "False", "no"])
def test_none_where_the_environment_says_no(tiny_llama, tmp_path, monkeypatch, word):
    monkeypatch.setenv("ANYDEVICE_PROGRESS", word)
    assert said_on_a_terminal(merging(tiny_llama, tmp_path), running(tiny_llama)) == ""


def test_none_in_a_log_file(tiny_llama, tmp_path):
    log = io.StringIO()
    with contextlib.redirect_stderr(log):
        for words in (merging(tiny_llama, tmp_path), running(tiny_llama)):
            assert cli.main([str(word) for word in words]) == 0
    assert log.getvalue() == ""
