"""What `mkdocs` adds to docs/: the README as the first page, and a page for each public module."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Pages that stand outside docs/, and where they are in the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "examples/anydevice-vulkan/README.md": "examples/anydevice-vulkan.md",
}
#: Each has a page of its own in the reference.
MODULES = (
    "anydevice",
    "anydevice.hooks",
    "anydevice.utils",
    "anydevice.backend",
    "anydevice.errors",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for source, target in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=_relink(text, source, target)))
    for module in MODULES:
        content = f"# `{module}`\n\n::: {module}\n    options: {{show_root_heading: false}}\n"
        files.append(File.generated(config, f"api/{module}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to where their target is in the site."""
    name = page.file.src_uri
    if name in OUTSIDE.values() or name.startswith("api/"):
        return markdown
    return _relink(markdown, f"docs/{name}", name)


def _relink(text: str, source: str, target: str) -> str:
    """Rewrite the relative links of a page that stands at `source` in the repository.

    Links to files that are no page, such as sources, become plain text.
    """

    def replace(match: re.Match[str]) -> str:
        label, link, anchor = match["label"], match["link"], match["anchor"] or ""
        if not link or re.match(r"[a-z]+:", link):
            return match[0]
        path = ((ROOT / source).parent / link).resolve().relative_to(ROOT).as_posix()
        if path in OUTSIDE or f"{path}/README.md" in OUTSIDE:
            page = OUTSIDE.get(path) or OUTSIDE[f"{path}/README.md"]
        elif path.startswith("docs/"):
            page = path.removeprefix("docs/")
            page = f"{page}/README.md" if (ROOT / path).is_dir() else page
        else:
            return label
        up = "../" * target.count("/")
        return f"[{label}]({up}{page}{anchor})"

    pattern = r"\[(?P<label>[^\]]*)\]\((?P<link>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)"
    return re.sub(pattern, replace, text)
