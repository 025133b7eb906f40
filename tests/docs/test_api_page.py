"""The API page has every public name, and says of each what the code says."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import reshard_ckpt
from reshard_ckpt import checkpoint, dcp, errors
from reshard_ckpt.core.catalog.model import Catalog, ShardView, TensorView
from reshard_ckpt.core.timeline import Step

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
SECTIONS = {part.split("\n", 1)[0]: part for part in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]}

PUBLIC: dict[str, Any] = {
    **{f"checkpoint.{name}": getattr(checkpoint, name) for name in checkpoint.__all__},
    **{name: getattr(reshard_ckpt, name) for name in reshard_ckpt.__all__ if inspect.isclass(getattr(reshard_ckpt, name))},
    **{f"dcp.{name}": getattr(dcp, name) for name in dcp.__all__ if not name.startswith("Async") and name != "format_utils"},
    **{f"dcp.format_utils.{name}": getattr(dcp.format_utils, name) for name in ("dcp_to_torch_save", "torch_save_to_dcp")},
    "Catalog": Catalog,
    "TensorView": TensorView,
    "ShardView": ShardView,
    "Step": Step,
}
RESULTS = {
    "checkpoint.CompactReport",
    "checkpoint.ConvertReport",
    "checkpoint.Diff",
    "checkpoint.GoodputReport",
    "checkpoint.Inspection",
    "checkpoint.LoadReport",
    "checkpoint.LoadedStep",
    "checkpoint.ReshardReport",
    "checkpoint.VerifyReport",
    "checkpoint.SaveHandle",
    "checkpoint.SaveReport",
    "checkpoint.Sizes",
    "checkpoint.Timeline",
    "Catalog",
    "TensorView",
    "ShardView",
    "Step",
}
ERRORS = {name for name, e in vars(errors).items() if inspect.isclass(e) and issubclass(e, Exception)}


def first_column(section: str) -> list[str]:
    cells = re.findall(r"^\| (`.*?) \| ", section, flags=re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def attributes(cls: type) -> set[str]:
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return {name for name in fields | set(vars(cls)) if not name.startswith("_")}


def test_page_has_every_public_name_and_no_other():
    assert {name for name in SECTIONS if re.match(r"checkpoint\.|dcp\.|[A-Z]\w+$", name)} - {
        "API",
        "Functions",
        "Results",
        "Errors",
    } == set(PUBLIC)


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - RESULTS))
def test_signature_and_parameters_are_those_of_the_code(name: str):
    signature = inspect.signature(PUBLIC[name])
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    written = re.search(r"```python\n(.*?)\n```", SECTIONS[name], flags=re.DOTALL)
    assert written
    # The formatter prefers the other quotes where a signature reads as a call.
    assert written[1].replace('"', "'") == name + str(inspect.Signature(plain))
    assert sorted(first_column(SECTIONS[name])) == sorted(signature.parameters)


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_attributes_are_those_of_the_code(name: str):
    assert set(first_column(SECTIONS[name])) == attributes(PUBLIC[name])


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_errors_exist_and_those_of_the_docstring_are_named(name: str):
    documented = inspect.getdoc(PUBLIC[name]) or ""
    raised = set(re.findall(r"\b[A-Z]\w+Error\b|\bCheckpointNotFound\b", documented.partition("Raises\n------")[2]))
    named = set(re.findall(r"`([A-Z]\w+Error|CheckpointNotFound)[`.]", SECTIONS[name]))
    assert raised <= named
    assert all(error in ERRORS or hasattr(builtins, error) for error in named)


def test_tree_of_errors_is_that_of_the_module():
    tree = textwrap.dedent((errors.__doc__ or "").partition("::\n\n")[2].partition("\n\n")[0])
    assert f"```text\n{tree}\n```" in SECTIONS["Errors"]
