"""Every code block of the documentation runs as it stands, and prints what the page says.

The blocks of a page run in order and share their names, in an empty working directory, on two
simulated accelerators of 64 MiB:

- ``python``: is executed; a ``text`` block right after it is what it prints.
- ``pycon``: is a doctest.
- ``console``: lines after ``$`` are commands of ``anydevice``; the lines below each are its output.
- ``sh``: installs something or starts a long job: its targets and subcommands must exist.

``...`` in an output stands for any text. What a page needs and need not show, such as a model of
the reader's own, stands in a comment: ``<!-- test: CODE -->``. After the comment
``<!-- test: # new process -->`` the next block runs in an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import io
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from warm import run_python

from anydevice import cli
from anydevice.state import AcceleratorState, GradientState

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in sorted(
        [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md")]
    )
    if re.search(r"^```\w|^<!-- test:", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
]
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$"
    r"|^<!-- test:(?P<hidden>.*?)-->",
    flags=re.DOTALL | re.MULTILINE,
)
NEW_PROCESS = "# new process"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LANGUAGES = {"python", "pycon", "console", "sh", "text", "toml", "yaml", "json", "make", "hidden"}


class Block(NamedTuple):
    language: str
    code: str
    line: int
    follows: bool  # nothing but a line or two stands between the block before and this one


def blocks_of(text):
    end = 0
    for match in BLOCK.finditer(text):
        between = text[end : match.start()].strip().splitlines()
        line = text.count("\n", 0, match.start()) + 1
        code = match["code"] if match["hidden"] is None else match["hidden"]
        indent = match["indent"] or ""
        code = "\n".join(row.removeprefix(indent) for row in code.splitlines()) + "\n"
        language = "hidden" if match["hidden"] is not None else match["language"]
        yield Block(language, code, line, len(between) <= 1)
        end = match.end()


def check_output(expected, got, where):
    if not doctest.OutputChecker().check_output(expected, got, FLAGS):
        pytest.fail(f"{where} prints\n{got}\nand the page says\n{expected}")


def execute(page, names, block):
    output = io.StringIO()
    code = "\n" * block.line + block.code  # tracebacks name the page's lines
    with contextlib.redirect_stdout(output):
        exec(compile(code, str(page), "exec"), names)
    return output.getvalue()


def execute_in_a_new_process(block):
    return run_python("-W", "error", "-c", block.code, check=True).stdout


def run_doctest(page, block, names):
    test = doctest.DocTestParser().get_doctest(block.code, names, page.name, str(page), block.line)
    report = io.StringIO()
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.write, clear_globs=False)
    names.update(test.globs)
    assert not report.getvalue(), report.getvalue()


def run_console(block, where):
    for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.code, re.MULTILINE):
        words = shlex.split(command, comments=True)
        assert words[0] == "anydevice", f"{where}: only anydevice's commands are run"
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            cli.main(words[1:])
        check_output(expected, output.getvalue(), f"{where}: {command}")


def check_shell(block, where):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in block.code.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert re.search(rf"^{re.escape(words[1])}:", makefile, re.MULTILINE), (
                f"{where}: {line}"
            )
        if words[:1] == ["anydevice"] and len(words) > 1 and not words[1].startswith("-"):
            with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()):
                cli.main([words[1], "--help"])
            assert ended.value.code == 0, f"{where}: {line}"


@pytest.fixture
def own_environment():
    """What a page sets in the environment is gone after it, and its accelerator too."""
    with mock.patch.dict(os.environ):
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_run_and_print_what_the_page_says(page, sim, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__", "__file__": str(page)}
    printed, new_process = "", False
    for block in blocks_of(page.read_text(encoding="utf-8")):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: name the block's language"
        if block.code.strip() == NEW_PROCESS:
            new_process = True
            continue
        if block.language in ("python", "hidden"):
            run = (
                execute_in_a_new_process if new_process else functools.partial(execute, page, names)
            )
            printed = run(block)
            new_process = False
            continue
        if block.language == "pycon":
            run_doctest(page, block, names)
        elif block.language == "console":
            run_console(block, where)
        elif block.language == "sh":
            check_shell(block, where)
        elif block.language == "text" and printed and block.follows:
            check_output(block.code, printed, where)
        printed = ""
