"""``anydevice completion``: a script by which a shell completes commands and options."""

from __future__ import annotations

import argparse
from typing import Any, Final

__all__ = ["register"]

_BASH: Final = """_anydevice() {
  local current=${COMP_WORDS[COMP_CWORD]}
  local command=${COMP_WORDS[1]}
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "%(commands)s" -- "$current"))
  elif [[ $current == -* ]]; then
    case $command in
%(cases)s
    esac
  else
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}
complete -o filenames -F _anydevice anydevice
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "completion",
        description='Put this line into ~/.bashrc: eval "$(anydevice completion bash)". For zsh, '
        'into ~/.zshrc: eval "$(anydevice completion zsh)". For fish: anydevice completion fish '
        "> ~/.config/fish/completions/anydevice.fish.",
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    options = _options()
    if args.shell == "fish":
        print(_fish(options))
        return 0
    cases = "\n".join(
        f'      {name}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$current"));;'
        for name, words in options.items()
    )
    script = _BASH % {"commands": " ".join(options), "cases": cases}
    if args.shell == "zsh":
        script = f"autoload -U +X bashcompinit && bashcompinit\n{script}"
    print(script, end="")
    return 0


def _fish(options: dict[str, list[str]]) -> str:
    lines = ["complete -c anydevice -n __fish_use_subcommand -f"]
    for name, words in options.items():
        lines.append(f"complete -c anydevice -n __fish_use_subcommand -a {name}")
        lines += [
            f"complete -c anydevice -n '__fish_seen_subcommand_from {name}' -l {word[2:]}"
            for word in words
            if word.startswith("--")
        ]
    return "\n".join(lines)


def _options() -> dict[str, list[str]]:
    """The options of every command, also of other packages'."""
    from anydevice.cli import full_parser
    from anydevice.launch.table import SETTINGS

    parser = full_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    found = {
        name: sorted(word for action in sub._actions for word in action.option_strings)
        for name, sub in commands.choices.items()
    }
    found["launch"] = sorted(flag for setting in SETTINGS for flag in setting.flags)
    return found
