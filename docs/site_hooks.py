"""Hooks of the site.

1. Each source file of the project that a page links to becomes a page of the site.
2. The landing page gets the table of frameworks from the README.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\]\((?:\.\./)+((?:[\w.-]+/)*[\w.-]+\.py)\)")

_TABLE = "<!-- On the site, the table of frameworks from README.md stands here. -->"


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file outside of docs/ that a page links to."""
    linked = {path for page in files.documentation_pages() for path in _LINK.findall(page.content_string)}
    for path in sorted(linked):
        source = (ROOT / path).read_text()
        text = f"# {path}\n\n```python\n{source}\n```\n"
        files.append(File.generated(config, f"source/{path}.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to files outside of docs/ to their pages, and insert the table of frameworks."""
    if _TABLE in markdown:
        section = re.search(r"^## In your framework\n(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)
        assert section is not None, "README.md has no section 'In your framework'"
        markdown = markdown.replace(_TABLE, section[1].replace("](docs/", "]("))
    up = "../" * page.file.src_uri.count("/")
    return _LINK.sub(rf"]({up}source/\1.md)", markdown)
