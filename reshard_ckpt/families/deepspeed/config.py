"""The blocks of a DeepSpeed config that choose this library: ``datastates_ckpt``, and ``nebula`` for a run in memory.

They are read as DeepSpeed reads them for its own engines of these names, so configs need not change. The newest releases of
DeepSpeed ignore ``nebula``; here it keeps its meaning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...plugins.errors import UsageError

BLOCKS = {"datastates_ckpt": "datastates_config", "nebula": "nebula_config"}
"""The blocks that choose this library, each with its attribute in DeepSpeed's config object."""


@dataclass(frozen=True, slots=True)
class NebulaBlock:
    """The options of the block ``nebula``.

    Attributes
    ----------
    path
        ``persistent_storage_path``: the folder to which checkpoints are copied from memory.
    interval_s
        ``persistent_time_interval``: the time between two such copies, in seconds.
    num_versions
        ``num_of_version_in_retention``: the number of checkpoints to keep there.
    loads
        ``enable_nebula_load``: whether a load looks into the run before the folder that it is given.
    load_path
        ``nebula_load_path``: the storage path of another run to start from.
    """

    path: str
    interval_s: float = 100
    num_versions: int = 2
    loads: bool = True
    load_path: str | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The options that the blocks of a config set; None for options that they leave open."""

    host_buffer_bytes: int | None = None
    nebula: NebulaBlock | None = None


def config_of(engine: Any) -> Mapping[str, Any]:
    """Return the config of an engine, as the user gave it."""
    found = engine.config if isinstance(engine.config, dict) else getattr(engine._config, "_param_dict", {})
    return found if isinstance(found, Mapping) else {}


def chosen_by(config: Mapping[str, Any]) -> Chosen | None:
    """Read the blocks of a config; return None if it has neither block, or none of them is enabled.

    Raises
    ------
    UsageError
        An option of a block has an impossible value, or both blocks are enabled.
    """
    blocks = {key: block for key in BLOCKS if (block := _enabled(config.get(key), by_default=key != "nebula")) is not None}
    if len(blocks) > 1:
        raise UsageError("the config has datastates_ckpt and nebula, and each says where checkpoints go; leave one of them out")
    if "datastates_ckpt" in blocks:
        return Chosen(host_buffer_bytes=_host_buffer_bytes(blocks["datastates_ckpt"]))
    return Chosen(nebula=_nebula(blocks["nebula"])) if blocks else None


def _enabled(block: Any, *, by_default: bool) -> Mapping[str, Any] | None:
    """Return an enabled block; None for a disabled or missing one. In DeepSpeed, only ``nebula`` must say ``enabled``."""
    if block is None or block is False:
        return None
    if block is True:
        return {}
    return block if block.get("enabled", by_default) else None


def _host_buffer_bytes(block: Mapping[str, Any]) -> int | None:
    threads = block.get("parser_threads")
    if threads is not None:
        warnings.warn(
            f"datastates_ckpt: parser_threads={threads!r} changes nothing here: one thread writes the files of a rank, and the "
            "system's page cache takes them at the speed of memory; leave it out",
            stacklevel=5,
        )
    size = block.get("host_cache_size")
    if size is None:
        return None
    _check("datastates_ckpt", "host_cache_size", size, _is_positive(size), "gigabytes of host memory, such as 16")
    return int(size * 2**30)


def _nebula(block: Mapping[str, Any]) -> NebulaBlock:
    path, load_path = block.get("persistent_storage_path"), block.get("nebula_load_path", block.get("load_path"))
    interval = block.get("persistent_time_interval", 100)
    versions, loads = block.get("num_of_version_in_retention", 2), block.get("enable_nebula_load", True)
    wanted = "the folder of the run's checkpoints, which all ranks share"
    _check("nebula", "persistent_storage_path", path, bool(path) and isinstance(path, str), wanted)
    _check("nebula", "nebula_load_path", load_path, load_path is None or isinstance(load_path, str), "the folder of another run")
    _check("nebula", "persistent_time_interval", interval, _is_positive(interval), "a number of seconds, such as 100")
    is_count = isinstance(versions, int) and _is_positive(versions)
    _check("nebula", "num_of_version_in_retention", versions, is_count, "a number of checkpoints, 1 or more")
    _check("nebula", "enable_nebula_load", loads, isinstance(loads, bool), "true or false")
    return NebulaBlock(path, interval, versions, loads, load_path or None)  # type: ignore[arg-type]


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _check(block: str, option: str, value: Any, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise UsageError(f"{block}: {option} is {value!r}, and should be {wanted}")
