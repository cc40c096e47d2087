"""Commands of other packages: found by their entry points, as installed."""

import importlib.metadata
import textwrap

import pytest

from anydevice import cli

#: A package's module; the group's function is named in its metadata.
GREET = """
    def register(subparsers):
        parser = subparsers.add_parser("greet", help="greet somebody, some times")
        parser.add_argument("name")
        parser.add_argument("--times", type=int, default=1)
        parser.set_defaults(run=run)

    def run(args):
        print(f"hello {args.name}\\n" * args.times, end="")
        return 5 if args.times > 2 else 0
"""


@pytest.fixture
def greet(tmp_path, monkeypatch):
    """An installed package with a command."""
    (tmp_path / "their_greeting.py").write_text(textwrap.dedent(GREET))
    metadata = tmp_path / "their_greeting-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: their-greeting\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        f"[{cli.COMMAND_GROUP}]\ngreet = their_greeting:register\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_command_of_another_package_works_as_our_own(greet, capsys):
    assert cli.main(["greet", "you", "--times", "2"]) == 0
    assert capsys.readouterr().out == "hello you\nhello you\n"
    assert cli.main(["greet", "you", "--times", "3"]) == 5  # its exit code
    for words in (["--help"], ["greet", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(words)
        assert "greet" in capsys.readouterr().out
    assert cli.main(["greeet", "you"]) == 2
    assert "did you mean 'greet'?" in capsys.readouterr().err
    assert cli.main(["completion", "bash"]) == 0
    assert 'greet) COMPREPLY=($(compgen -W "--help --times -h"' in capsys.readouterr().out


def test_a_broken_one_leaves_the_rest(monkeypatch, capsys):
    class Broken:
        name = "broken"

        def load(self):
            raise ImportError("no module named nothing")

    def entry_points(group):
        return [Broken()] if group == cli.COMMAND_GROUP else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert cli.main(["backends"]) == 0
    assert "command 'broken' is broken: no module named nothing" in capsys.readouterr().err
