"""What the blocks of a DeepSpeed config choose. Needs no DeepSpeed."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from reshard_ckpt.errors import UsageError
from reshard_ckpt.families.deepspeed.calls import Chosen, chosen_by, config_of
from reshard_ckpt.families.deepspeed.nebula import NebulaBlock

PATH = {"enabled": True, "persistent_storage_path": "/runs/a"}


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        ({}, None),
        ({"datastates_ckpt": None, "nebula": {"persistent_storage_path": "/runs/a"}}, None),  # DeepSpeed's default: not enabled
        ({"nebula": {**PATH, "enabled": False}, "datastates_ckpt": True}, Chosen()),
        ({"datastates_ckpt": {"host_cache_size": 0.5}}, Chosen(host_buffer_bytes=2**29)),
        ({"nebula": PATH}, Chosen(nebula=NebulaBlock("/runs/a", 100, 2, True, None))),
        (
            {
                "nebula": {
                    **PATH, "persistent_time_interval": 7.5, "num_of_version_in_retention": 4, "enable_nebula_load": False,
                    "nebula_load_path": "/runs/b",
                }
            },
            Chosen(nebula=NebulaBlock("/runs/a", 7.5, 4, False, "/runs/b")),
        ),
    ],
)  # fmt: skip
def test_blocks_choose(config: dict[str, Any], chosen: Chosen | None):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert chosen_by(config) == chosen


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"datastates_ckpt": {"host_cache_size": "16GB"}}, "host_cache_size is '16GB'"),
        ({"datastates_ckpt": {"host_cache_size": True}}, "host_cache_size is True"),
        ({"nebula": {"enabled": True}}, "persistent_storage_path is None"),
        ({"nebula": {**PATH, "persistent_time_interval": 0}}, "persistent_time_interval is 0"),
        ({"nebula": {**PATH, "num_of_version_in_retention": 1.5}}, "num_of_version_in_retention is 1.5"),
        ({"nebula": {**PATH, "enable_nebula_load": "no"}}, "enable_nebula_load is 'no'"),
        ({"nebula": {**PATH, "nebula_load_path": 3}}, "nebula_load_path is 3"),
        ({"nebula": PATH, "datastates_ckpt": {}}, "leave one of them out"),
    ],
)
def test_values_that_cannot_be_meant_are_named(config: dict[str, Any], said: str):
    with pytest.raises(UsageError, match=said):
        chosen_by(config)


def test_threads_that_parse_are_said_to_change_nothing():
    with pytest.warns(UserWarning, match="parser_threads=4 changes nothing"):
        assert chosen_by({"datastates_ckpt": {"parser_threads": 4}}) == Chosen()


def test_the_config_is_found_where_it_was_given_as_a_dict_and_as_a_file():
    config = {"nebula": PATH}
    assert config_of(SimpleNamespace(config=config)) == config
    assert config_of(SimpleNamespace(config="ds.json", _config=SimpleNamespace(_param_dict=config))) == config
    assert config_of(SimpleNamespace(config=None, _config=SimpleNamespace())) == {}
