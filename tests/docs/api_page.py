"""The sections of docs/api.md about public names, written from their docstrings.

``python -m tests.docs.api_page`` writes the page anew: each section whose title is a public name is replaced, in the order of the
page; all other text stays as it is. To add a name to the page, add a line with its title.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reshard_ckpt
from reshard_ckpt import checkpoint, dcp
from reshard_ckpt.core.catalog.model import Catalog, ShardView, TensorView
from reshard_ckpt.core.timeline import Step

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"

PUBLIC: dict[str, Any] = {
    **{f"checkpoint.{name}": getattr(checkpoint, name) for name in checkpoint.__all__},
    **{name: getattr(reshard_ckpt, name) for name in reshard_ckpt.__all__ if inspect.isclass(getattr(reshard_ckpt, name))},
    "register_placement": reshard_ckpt.register_placement,
    **{f"dcp.{name}": getattr(dcp, name) for name in dcp.__all__ if not name.startswith("Async") and name != "format_utils"},
    **{f"dcp.format_utils.{name}": getattr(dcp.format_utils, name) for name in ("dcp_to_torch_save", "torch_save_to_dcp")},
    **{cls.__name__: cls for cls in (Catalog, TensorView, ShardView, Step)},
}


def sections_of(docstring: str) -> dict[str, str]:
    """Split a numpydoc docstring into its sections; the text before the first one is under ''."""
    parts = re.split(r"^(\w+)\n-{3,}\n", docstring, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def entries_of(section: str) -> tuple[list[tuple[str, str]], str]:
    """Return the entries of a section, a name with its indented text, and the text between them that is not indented."""
    entries, rest = [], []
    for paragraph in re.split(r"\n(?=\S)", section.strip("\n")):
        name, newline, text = paragraph.partition("\n")
        if newline and text.startswith("    "):
            entries.append((name, text))
        else:
            rest.append(paragraph)
    return entries, "\n".join(rest)


def prose(text: str) -> str:
    """Return the text of a docstring as Markdown: one line a paragraph, without indents."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))
    return re.sub(r"``(.+?)``", r"`\1`", "\n\n".join(paragraphs))


def table(head: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    if rows:
        cells = [f"| {name} | {prose(text).replace(chr(10) * 2, ' ').replace('|', chr(92) + '|')} |" for name, text in rows]
        yield "\n".join([f"| {head} | |", "| --- | --- |", *cells])


def signature_of(name: str, thing: Any) -> str:
    signature = inspect.signature(thing)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    shown = name + str(inspect.Signature(plain))
    return shown if "*" in shown else shown.replace("'", '"')  # without * it reads as a call, and the formatter prefers these


def methods_of(cls: type) -> list[tuple[str, str]]:
    """List the public methods and properties of a class with the first paragraph of what their docstrings say."""
    found = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items() if base is not object}
    rows = []
    for name, member in found.items():
        is_method = inspect.isfunction(member) or isinstance(member, classmethod)
        if name.startswith("_") or not (is_method or isinstance(member, property)):
            continue
        shown = signature_of(name, getattr(cls, name)) if is_method else name
        rows.append((f"`{shown}`", (inspect.getdoc(member) or "").split("\n\n")[0]))
    return rows


def body_of(name: str) -> str:
    """Return the section of one public name, without its title."""
    thing = PUBLIC[name]
    sections = sections_of(inspect.getdoc(thing) or "")
    parts = []
    if "Parameters" in sections or not inspect.isclass(thing):
        parts.append(f"```python\n{signature_of(name, thing)}\n```")
    parts.append(prose(sections[""]))
    for title, head in (("Parameters", "parameter"), ("Attributes", "attribute")):
        entries, rest = entries_of(sections.get(title, ""))
        parts += table(head, [(", ".join(f"`{one}`" for one in names.split(", ")), text) for names, text in entries])
        parts += [prose(rest)] if rest else []
    if inspect.isclass(thing):
        parts += table("method or property", methods_of(thing))
    for kind, text in entries_of(sections.get("Returns", ""))[0]:
        parts.append(f"Returns `{kind}`. {prose(text)}")
    parts += table(
        "raises", [(f"`{kind.replace(', ', '`, `')}`", text) for kind, text in entries_of(sections.get("Raises", ""))[0]]
    )
    return "\n\n".join(parts)


def written(page: str) -> str:
    """Return the page with the section of each public name written from its docstring."""
    parts = re.split(r"^(#+ .*)\n", page, flags=re.MULTILINE)
    for at in range(1, len(parts), 2):
        name = parts[at].lstrip("# ")
        if name in PUBLIC:
            parts[at + 1] = f"\n{body_of(name)}\n\n"
        parts[at] += "\n"
    return "".join(parts).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
