"""The API page shows each public name, and the docstring of each describes all its parameters, attributes and methods."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import reshard_ckpt
from reshard_ckpt import checkpoint, dcp, integrations, megatron, vescale
from reshard_ckpt.families.lightning.strategies import STRATEGIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
SHOWN = re.findall(r"^::: (\S+)$", PAGE.read_text(), flags=re.MULTILINE)
INTEGRATIONS = [
    importlib.import_module(f"{integrations.__name__}.{each.name}") for each in pkgutil.iter_modules(integrations.__path__)
]
NOT_SHOWN = {
    *(f"reshard_ckpt.{name}" for name in ("checkpoint", "dcp.format_utils")),
    *(f"reshard_ckpt.dcp.{name}" for name in ("AsyncCheckpointerType", "AsyncSaveResponse")),  # torch's own
    *(f"reshard_ckpt.integrations.lightning.{name}" for name in STRATEGIES),  # classes made from Lightning's
    *(f"reshard_ckpt.megatron.{name}" for name in ("LoadStrategy", "SaveStrategy")),  # classes made from Megatron's
    "reshard_ckpt.integrations.torchtitan.ReshardCheckpointManager",  # a class made from torchtitan's
}


def entries_of(docstring: str, *titles: str) -> set[str]:
    """List the names that sections of a numpydoc docstring describe."""
    parts = re.split(r"^(\w+)\n-{3,}\n", docstring, flags=re.MULTILINE)
    sections = [text for title, text in zip(parts[1::2], parts[2::2], strict=True) if title in titles]
    return {one for text in sections for names in re.findall(r"^(\S.*)\n    ", text, re.MULTILINE) for one in names.split(", ")}


def methods_of(cls: type) -> dict[str, str]:
    """Map the public methods and properties of a class to their docstrings."""
    found = {name: member for base in cls.__mro__[:-1] for name, member in vars(base).items() if not name.startswith("_")}
    kinds = (property, classmethod, type(methods_of))
    return {name: inspect.getdoc(getattr(cls, name)) or "" for name, member in found.items() if isinstance(member, kinds)}


def test_page_has_every_public_name():
    modules = [reshard_ckpt, checkpoint, dcp, megatron, vescale, *INTEGRATIONS]
    public = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    assert public - {*SHOWN} == NOT_SHOWN & public
    assert len({*SHOWN}) == len(SHOWN)


@pytest.mark.parametrize("path", [path for path in SHOWN if path != "reshard_ckpt.errors"])
def test_docstring_describes_every_parameter_attribute_and_method(path: str):
    module, _, name = path.rpartition(".")
    thing = getattr(importlib.import_module(module), name)
    docstring = inspect.getdoc(thing) or ""
    parameters = entries_of(docstring, "Parameters")
    if parameters or not inspect.isclass(thing):
        expected = set(inspect.signature(thing).parameters) - {"self"}
    else:
        fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
        expected = {field.name for field in fields if not field.name.startswith("_")}
    assert expected <= parameters | entries_of(docstring, "Attributes")
    assert not inspect.isclass(thing) or all(methods_of(thing).values())
