"""Core knows no hardware: fail when a device name stands in its code, outside docstrings.

usage: python scripts/check_core_names.py FOLDER
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

_NAMES = (
    "cuda|rocm|hip|mps|xpu|npu|mlu|musa|hpu|sdaa|neuron|vulkan|xla|tpu|maia|mtia|ascend|nvidia|intel|"
    "cambricon|sim"
)
# A name counts as a word of its own, also inside an identifier: is_npu_available, CudaThing.
_PATTERN = re.compile(rf"(?<![a-z])({_NAMES})(?![a-z])")


def docstring_lines(tree: ast.AST) -> set[int]:
    """The lines that docstrings stand on."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body or not isinstance(body[0], ast.Expr):
            continue
        value = body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines.update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    return lines


def leaks(source: str) -> Iterator[tuple[int, str]]:
    """Each place in ``source`` where a name or a string names a device: its line and text."""
    documented = docstring_lines(ast.parse(source))
    spoken = {tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in spoken or token.start[0] in documented:
            continue
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", token.string).lower()
        if _PATTERN.search(words):
            yield token.start[0], token.string.strip()


def main(folder: str) -> int:
    """Print every leak under ``folder``; 1 when there is one."""
    found = [
        f"{path}:{line}: {text[:80]}"
        for path in sorted(Path(folder).rglob("*.py"))
        for line, text in leaks(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(found) or f"no device name in {folder}/")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
