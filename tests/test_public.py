"""The public names and signatures: what other people's scripts are written against."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import reshard_ckpt
from reshard_ckpt import checkpoint, dcp, errors, plugins
from tests.launch import ROOT, project_table

PACKAGE = ["FlatShard", "LocalShard", "Shards", "checkpoint", "errors", "register_placement"]
CHECKPOINT = [
    "CompactReport", "ConvertReport", "Diff", "GoodputReport", "Inspection", "LiveReshard", "LoadReport", "LoadedStep",
    "Manager", "Memory", "PerRank", "RecoveryReport", "ReshardReport", "SaveHandle", "SaveReport", "Sizes", "Timeline",
    "TouchedRows", "Value", "VerifyReport", "async_save",
    "catalog", "compact", "convert", "diff", "goodput", "inspect", "load", "plot",
    "prepare", "read", "recover", "reshard", "reshard_live", "save", "sizes", "timeline", "verify", "write_manifest",
]  # fmt: skip
DCP = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "ReshardReader",
    "ReshardWriter",
    "async_save",
    "format_utils",
    "load",
    "save",
]

MAX_PLUGIN_NAMES = 35
"""More than that is a sign that plugins reach into the core."""

SAVE = [
    "exclude", "mesh", "process_group", "metadata", "timeline", "sha256", "replicas", "base", "verify_base", "rows", "grace",
    "progress", "timeout_s",
]  # fmt: skip
OPTIONS = {
    "save": SAVE,
    "async_save": [*SAVE, "staging", "hold", "host_buffer_bytes", "when_busy"],
    "reshard_live": [
        "process_group", "cast", "rename", "staged", "strict", "allow_missing", "ignore", "replicas", "memory_bytes", "timeout_s",
    ],
    "load": [
        "strict", "verify", "verify_first", "cast", "rename", "allow_resize", "allow_missing", "ignore", "read_once", "progress",
        "process_group", "timeout_s",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "names"), [(reshard_ckpt, PACKAGE), (checkpoint, CHECKPOINT), (dcp, DCP)], ids=["package", "checkpoint", "dcp"]
)
def test_public_names_are_exactly_these(module: object, names: list[str]):
    assert module.__all__ == names  # type: ignore[attr-defined]
    assert all(hasattr(module, name) for name in names)


@pytest.mark.parametrize("name", OPTIONS)
def test_path_and_state_are_positional_and_options_are_named(name: str):
    parameters = inspect.signature(getattr(checkpoint, name)).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert positional == (["src", "dst"] if name == "reshard_live" else ["path", "state"])
    assert sorted(named) == sorted(OPTIONS[name])


@pytest.mark.parametrize("name", [*PACKAGE, *(f"checkpoint.{name}" for name in CHECKPOINT), *(f"dcp.{name}" for name in DCP)])
def test_every_public_name_is_documented(name: str):
    thing = reshard_ckpt
    for part in name.split("."):
        thing = getattr(thing, part)
    assert inspect.getdoc(thing)


def test_every_error_is_one_family():
    family = [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, Exception)]
    assert len(family) > 5
    assert all(issubclass(e, errors.CheckpointError) for e in family)
    assert all(e.__name__ in (errors.__doc__ or "") for e in family)


def test_package_is_typed_and_says_one_version():
    project = project_table()
    assert (files("reshard_ckpt") / "py.typed").is_file()
    assert reshard_ckpt.__version__ == project["version"]


def test_constraints_pin_every_dependency_within_its_range():
    project = project_table()
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if "==" in line}
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {re.split(r"[\[<>=!~ ]", line)[0].lower() for line in wanted} - {"reshard-ckpt"}
    assert names <= pinned


def test_reports_become_json_by_asdict(tmp_path: Path):
    state = {"model": torch.nn.Linear(2, 2), "step": 3}
    made = [
        checkpoint.save(tmp_path / "a", state),
        checkpoint.load(tmp_path / "a", state),
        checkpoint.verify(tmp_path / "a"),
        checkpoint.timeline(tmp_path / "a"),
        checkpoint.diff(tmp_path / "a", tmp_path / "a", values=True),
        checkpoint.convert(tmp_path / "a", tmp_path / "b"),
        checkpoint.reshard(tmp_path / "a", tmp_path / "c", mesh={"dp": 2}),
        checkpoint.compact(tmp_path / "a"),
        checkpoint.goodput(state_gb=1, write_gbps=1, mtbf="3h"),
    ]
    assert all(json.loads(json.dumps(dataclasses.asdict(report))) for report in made)


def test_plugins_have_few_names_and_the_page_lists_them_all() -> None:
    named = set(re.findall(r"`([A-Za-z_]+)`", (ROOT / "docs" / "plugins.md").read_text()))
    assert len(plugins.__all__) <= MAX_PLUGIN_NAMES
    assert sorted(set(plugins.__all__) - named) == []
    assert all(hasattr(plugins, name) for name in plugins.__all__)
    for name in ("dcp", "errors", "groups", "names", "packages", "placements", "runs", "states", "torchfile", "trees"):
        module = getattr(plugins, name)
        assert sorted(set(module.__all__) - named) == []
        assert all(hasattr(module, name) for name in module.__all__)
