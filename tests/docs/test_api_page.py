"""The API page says of each public name what its docstring says."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap

import pytest

from reshard_ckpt import errors
from tests.docs.api_page import PAGE, PUBLIC, entries_of, methods_of, sections_of, written


def test_page_is_written_from_the_docstrings():
    assert written(PAGE.read_text()) == PAGE.read_text(), "run python -m tests.docs.api_page"


def test_page_has_every_public_name():
    titles = re.findall(r"^#+ (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(name for name in titles if name in PUBLIC) == sorted(PUBLIC)
    assert not [name for name in titles if name.startswith(("checkpoint.", "dcp.")) and name not in PUBLIC]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_docstring_describes_every_parameter_attribute_and_method(name: str):
    thing = PUBLIC[name]
    sections = sections_of(inspect.getdoc(thing) or "")
    entries = [entry for title in ("Parameters", "Attributes") for entry in entries_of(sections.get(title, ""))[0]]
    described = {one for names, _ in entries for one in names.split(", ")}
    if "Parameters" in sections or not inspect.isclass(thing):
        expected = set(inspect.signature(thing).parameters) - {"self"}
    else:
        fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
        expected = {field.name for field in fields if not field.name.startswith("_")}
    assert expected <= described
    assert not inspect.isclass(thing) or all(text for _, text in methods_of(thing))


def test_tree_of_errors_is_that_of_the_module():
    tree = textwrap.dedent((errors.__doc__ or "").partition("::\n\n")[2].partition("\n\n")[0])
    assert f"```text\n{tree}\n```" in PAGE.read_text()
