"""DeepSpeed's engine saves and loads through this library: `attach` it to one engine, or `install` it for all that configure it.

``engine.save_checkpoint(dir, tag)`` writes a checkpoint of this library at ``dir/tag``, with global named tensors, in the
background (`engine`). ``engine.load_checkpoint`` loads a checkpoint of this library or of DeepSpeed, from any number of ranks,
ZeRO stage and precision (`loading`).

The blocks ``datastates_ckpt`` and ``nebula`` of a DeepSpeed config choose this library, too. They are read as DeepSpeed reads
them for its own engines of these names, so configs need not change. The newest releases of DeepSpeed ignore or refuse ``nebula``;
here it keeps its meaning.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ...plugins.errors import UsageError
from ...plugins.packages import Replaced
from .engine import REPLACED, Engine, OldMethods
from .loading import load_checkpoint
from .nebula import NebulaBlock, NebulaRun
from .trainer import see_commits, see_commits_in_lightning

BLOCKS = {"datastates_ckpt": "datastates_config", "nebula": "nebula_config"}
"""Blocks of a DeepSpeed config that choose this library, each with the attribute of DeepSpeed's config object for it."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The options that the blocks of a DeepSpeed config set; None for each option that the config leaves open."""

    host_buffer_bytes: int | None = None
    nebula: NebulaBlock | None = None


def config_of(engine: Any) -> Mapping[str, Any]:
    """Return the config dict of a DeepSpeed engine, as the user gave it."""
    found = engine.config if isinstance(engine.config, dict) else getattr(engine._config, "_param_dict", {})
    return found if isinstance(found, Mapping) else {}


def chosen_by(config: Mapping[str, Any]) -> Chosen | None:
    """Read the blocks of a config; return None if it has neither block, or none of them is enabled.

    Raise `UsageError` if an option of a block has an impossible value, or both blocks are enabled.
    """
    blocks = {key: block for key in BLOCKS if (block := _enabled(config.get(key), by_default=key != "nebula")) is not None}
    if len(blocks) > 1:
        raise UsageError("the config has datastates_ckpt and nebula, and each says where checkpoints go; leave one of them out")
    if "datastates_ckpt" in blocks:
        return Chosen(host_buffer_bytes=_host_buffer_bytes(blocks["datastates_ckpt"]))
    return Chosen(nebula=_nebula(blocks["nebula"])) if blocks else None


def _enabled(block: Any, *, by_default: bool) -> Mapping[str, Any] | None:
    """Return a block of DeepSpeed's config as a dict; None if it is missing or disabled.

    A block without the key ``enabled`` is enabled if `by_default` is True: in DeepSpeed, only ``nebula`` needs the key.
    """
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


__all__ = ["attach", "detach", "install"]


def attach(engine: Any, *, host_buffer_bytes: int | None = None, timeout_s: float = 600.0) -> Any:
    """Have a DeepSpeed engine save and load through this library; all ranks call it.

    The blocks ``datastates_ckpt`` and ``nebula`` of the engine's config set options.

    Parameters
    ----------
    engine
        The first result of ``deepspeed.initialize``; a ``PipelineEngine`` too.
    host_buffer_bytes, timeout_s
        As in `checkpoint.async_save`. `host_buffer_bytes` overrides ``host_cache_size`` of ``datastates_ckpt``.

    Returns
    -------
    The engine.

    Raises
    ------
    UsageError
        `engine` is not an engine of DeepSpeed, or a block of its config is wrong.
    """
    if not hasattr(engine, "checkpoint_engine") or not hasattr(engine, "save_checkpoint"):
        raise UsageError(f"attach: wanted what deepspeed.initialize returns first, got {type(engine).__name__}")
    if not isinstance(engine.checkpoint_engine, Engine):
        from deepspeed.runtime.checkpoint_engine import checkpoint_engine

        chosen = chosen_by(config_of(engine)) or Chosen()
        nebula = None if chosen.nebula is None else NebulaRun(chosen.nebula, timeout_s)
        size = host_buffer_bytes or chosen.host_buffer_bytes
        engine.checkpoint_engine = Engine(engine, engine.checkpoint_engine, size, timeout_s, nebula)
        engine.load_checkpoint = _Loading(engine)
        if not hasattr(checkpoint_engine, "CheckpointCommitInfo"):  # this release passes only the tag to `create`
            engine.checkpoint_engine.old = OldMethods(engine)
    return engine


def detach(engine: Any) -> Any:
    """Undo `attach`, after waiting for a save that is under way: the engine saves and loads as DeepSpeed does. Return the engine.

    Parameters
    ----------
    engine
        An engine that `attach` or `install` attached; any other stays as it is.
    """
    if isinstance(engine.checkpoint_engine, Engine):
        engine.checkpoint_engine.cleanup()
        engine.checkpoint_engine = engine.checkpoint_engine.stock
        for name in ("load_checkpoint", *REPLACED):
            vars(engine).pop(name, None)
    return engine


def install(*, always: bool = False) -> None:
    """Attach every engine that is made from now on whose config has the block ``datastates_ckpt`` or ``nebula``.

    In ``datastates_ckpt``, ``host_cache_size`` (GB) bounds the host memory of a rank. ``nebula`` saves to the memory of nodes.
    Call it before ``deepspeed.initialize``; a second call does nothing.

    Parameters
    ----------
    always
        Attach every engine, without a block in its config: for programs that configure DeepSpeed by themselves. If transformers
        is installed, its Trainer resumes from committed checkpoints only, keeps the last one until the next is committed, and
        waits for the last save before ``train()`` returns. Call it before ``get_last_checkpoint`` is imported by its name.
        Under Lightning's ``DeepSpeedStrategy``, an old checkpoint is removed after the commit of the next, and ``fit`` waits for
        the last.

    Raises
    ------
    UsageError
        With `always`, the installed transformers has another Trainer than this knows.
    """
    from deepspeed.runtime import config
    from deepspeed.runtime.engine import DeepSpeedEngine

    # Since 0.19.7 DeepSpeed refuses a config with this block, because it ignores it. Here the block still has a meaning.
    for name, table in vars(config).items():
        if name.startswith("_REMOVED_") and isinstance(table, dict):
            table.pop("nebula", None)
    if always:
        DeepSpeedEngine.reshard_ckpt_always = True
        if importlib.util.find_spec("transformers") is not None:
            see_commits()
    _REPLACED.install({"_configure_checkpointing": _configure_checkpointing})


_REPLACED = Replaced(lambda: [importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine])


def _configure_checkpointing(engine: Any, *arguments: Any) -> None:
    """Configure an engine with DeepSpeed's own method; then attach this library if the config or ``always`` asks for it."""
    stock = _REPLACED.stock["_configure_checkpointing"]
    if chosen_by(config_of(engine)) is None and not getattr(engine, "reshard_ckpt_always", False):
        stock(engine, *arguments)
        return
    with ExitStack() as disabled:
        for name in BLOCKS.values():  # DeepSpeed would import the packages of these checkpoint engines
            if (block := getattr(engine._config, name, None)) is not None:
                disabled.callback(setattr, block, "enabled", block.enabled)
                block.enabled = False
        stock(engine, *arguments)
    attach(engine)
    see_commits_in_lightning()


class _Loading:
    """Replaces ``engine.load_checkpoint`` of a DeepSpeed engine while this library is attached to it."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._stock = type(engine).load_checkpoint

    def __call__(self, load_dir: str, tag: Any = None, *arguments: Any, **options: Any) -> Any:
        engine = self._engine()
        assert engine is not None
        ours = engine.checkpoint_engine
        if not isinstance(ours, Engine):
            return self._stock(engine, load_dir, tag, *arguments, **options)
        ours.finish()
        names = ("load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only", "custom_load_fn")
        options |= dict(zip(names, arguments, strict=False))
        return load_checkpoint(engine, load_dir, tag, timeout_s=ours.timeout_s, find=ours.find, **options)
