"""DeepSpeed's engine saves and loads through this library: `attach` it to one engine, or `install` it for all that configure it.

``engine.save_checkpoint(dir, tag)`` writes a checkpoint of this library at ``dir/tag``, with global named tensors, in the
background:

1. DeepSpeed calls `Engine.create`, and then `Engine.save` for each file that it would write. The last of these calls on a rank
   begins one save of the engine's whole state (`saving`). The other calls write nothing.
2. Training goes on. A step of the optimizer waits until the tensors that it changes are copied.
3. After the commit, rank 0 replaces the file ``latest``. If a save is killed before that, ``latest`` still has the old tag.

``engine.load_checkpoint`` loads a checkpoint of this library or of DeepSpeed, from any number of ranks, ZeRO stage and precision
(`loading`).
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist

from ...plugins import checkpoint
from ...plugins.errors import CheckpointError, UnsupportedError, UsageError
from .config import BLOCKS, Chosen, chosen_by, config_of
from .engine_state import base_optimizer, refuse_unsupported
from .live import write_latest
from .loading import find_saved, load_checkpoint
from .nebula import NebulaRun
from .releases import REPLACED, OldMethods, tells_tag_alone
from .saving import copied, state_of
from .values import NOT_VALUES

__all__ = ["attach", "detach", "install"]

_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_OPTIMIZER = re.compile(r".*optim_states\.pt")
_LAYER = re.compile(r"layer_\d+.*model_states\.pt")


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
        chosen = chosen_by(config_of(engine)) or Chosen()
        nebula = None if chosen.nebula is None else NebulaRun(chosen.nebula, timeout_s)
        size = host_buffer_bytes or chosen.host_buffer_bytes
        engine.checkpoint_engine = Engine(engine, engine.checkpoint_engine, size, timeout_s, nebula)
        engine.load_checkpoint = _Loading(engine)
        if tells_tag_alone():
            engine.checkpoint_engine.old = OldMethods(engine)
    return engine


def detach(engine: Any) -> Any:
    """Wait for a save that is under way, and give the engine DeepSpeed's own checkpoints back; return the engine."""
    if isinstance(engine.checkpoint_engine, Engine):
        engine.checkpoint_engine.cleanup()
        engine.checkpoint_engine = engine.checkpoint_engine.stock
        for name in ("load_checkpoint", *REPLACED):
            vars(engine).pop(name, None)
    return engine


def install() -> None:
    """Attach every engine that is made from now on whose config has the block ``datastates_ckpt`` or ``nebula``.

    In ``datastates_ckpt``, ``host_cache_size`` (GB) bounds the host memory of a rank. ``nebula`` saves to the memory of nodes.
    Call it before ``deepspeed.initialize``; a second call does nothing.
    """
    from deepspeed.runtime import config
    from deepspeed.runtime.engine import DeepSpeedEngine

    # Since 0.19.7 DeepSpeed refuses a config with this block, because it ignores it. Here the block still has a meaning.
    for name, table in vars(config).items():
        if name.startswith("_REMOVED_") and isinstance(table, dict):
            table.pop("nebula", None)
    if getattr(DeepSpeedEngine._configure_checkpointing, "of_reshard_ckpt", False):
        return
    DeepSpeedEngine._configure_checkpointing = _configured(DeepSpeedEngine._configure_checkpointing)


def _configured(stock: Callable[..., None]) -> Callable[..., None]:
    def configure(engine: Any, *arguments: Any) -> None:
        if chosen_by(config_of(engine)) is None:
            stock(engine, *arguments)
            return
        with ExitStack() as disabled:
            for name in BLOCKS.values():  # DeepSpeed would import the packages of these checkpoint engines
                if (block := getattr(engine._config, name, None)) is not None:
                    disabled.callback(setattr, block, "enabled", block.enabled)
                    block.enabled = False
            stock(engine, *arguments)
        attach(engine)

    configure.of_reshard_ckpt = True  # type: ignore[attr-defined]
    return configure


class _Loading:
    """``engine.load_checkpoint`` while this library is attached to the engine."""

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


class Engine:
    """A checkpoint engine with the methods that DeepSpeed calls, for one DeepSpeed engine.

    Parameters
    ----------
    engine
        The engine whose checkpoints these are.
    stock
        The checkpoint engine that it replaces. It still handles files that are not a checkpoint, such as ``save_16bit_model``.
    host_buffer_bytes, timeout_s
        As for `checkpoint.async_save`.
    nebula
        The run to save to. Without one, each checkpoint is a folder below the folder that a save is given.
    """

    def __init__(
        self, engine: Any, stock: Any, host_buffer_bytes: int | None, timeout_s: float, nebula: NebulaRun | None = None
    ) -> None:
        self.name, self.stock, self.timeout_s = "ReshardCheckpointEngine", stock, timeout_s
        self._engine = weakref.ref(engine)
        self._host_buffer_bytes, self._nebula = host_buffer_bytes, nebula
        self.find = partial(find_saved, timeout_s=timeout_s) if nebula is None else nebula.find
        self._info: Any = None
        self._values: dict[str, Any] = {}
        self._kept: frozenset[str] | None = None
        self._changed: dict[str, Any] = {}
        self._running: _Running | None = None
        self.old: OldMethods | None = None
        _AT_EXIT.add(self)

    def create(self, info: Any) -> None:
        """Begin a checkpoint: wait for the commit of the last one, and have DeepSpeed call `save` on every rank."""
        self._set_back()
        if self.old is not None:
            info = self.old.info or info
        if not self._is_checkpoint(info):
            self.stock.create(info)
            return
        engine = self._of()
        refuse_unsupported(engine)
        self.finish()
        self._info, self._values, self._kept = info, {}, None
        self._change(engine, save_non_zero_checkpoint=True)
        # DeepSpeed would copy all experts, to write them to files of their own.
        self._change(engine, has_moe_layers=False)
        # DeepSpeed would copy all frozen parameters; this library saves the live ones.
        self._change(engine, _get_zero_frozen_param_attributes=lambda function: {})

    def save(self, state_dict: Any, path: str) -> None:
        """Receive the content of one file. The call for the last file of a rank begins the save of the whole state."""
        folder, name = os.path.split(path)
        # Not a file of the checkpoint that was begun, such as one of ``save_16bit_model``: DeepSpeed's own engine writes it.
        if self._info is None or os.path.abspath(folder) != os.path.abspath(self._path()):
            self.stock.save(state_dict, path)
            return
        engine = self._of()
        if _LAYER.fullmatch(name):
            return
        # The optimizer's file, if this rank writes one, comes after the model's.
        if _MODEL.fullmatch(name):
            self._values = {key: copied(value) for key, value in state_dict.items() if key not in NOT_VALUES}
            module = state_dict.get("module")
            self._kept = frozenset(module) if isinstance(module, dict) else None
            if engine.save_zero_checkpoint:
                return
        elif not _OPTIMIZER.fullmatch(name):
            raise UnsupportedError(f"{path}: DeepSpeed saves a file of this name in a way that is not known here")
        self._begin(engine)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load one file, as DeepSpeed's own engine does."""
        return self.stock.load(path, map_location=map_location)

    def commit(self, info: Any) -> bool:
        """Wait until the checkpoint is committed and ``latest`` names it; return True."""
        if self._running is None or info != self._running.info:
            return bool(self.stock.commit(info))
        self.finish()
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return whether a data-parallel rank writes replicated content, as DeepSpeed expects; here, every rank writes a part."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Return True: the commit comes some time after `save`, and only then is ``latest`` written."""
        return True

    def set_commit_info(self, info: Any) -> None:
        """Do nothing: see `get_commit_info`."""

    def get_commit_info(self) -> None:
        """Return None: DeepSpeed need not commit anything, because each save commits by itself."""

    def preserves_storage_sharing(self) -> bool:
        """Return False, so that DeepSpeed does not clone tensors to shrink them."""
        return False

    def cleanup(self) -> None:
        """Wait for a save that is under way; DeepSpeed calls this at the end."""
        self._set_back()
        self.finish()
        if self._nebula is not None:
            self._nebula.close()

    def finish(self) -> None:
        """Wait until the last save is committed and ``latest`` names it; raise the error of a save that failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _is_checkpoint(self, info: Any) -> bool:
        """Tell a checkpoint from the one file of ``save_16bit_model``, whose name DeepSpeed passes in the place of a tag."""
        return hasattr(info, "save_dir") and not str(info.tag).endswith((".bin", ".pt", ".safetensors"))

    def _of(self) -> Any:
        engine = self._engine()
        assert engine is not None
        return engine

    def _path(self) -> str:
        return os.path.join(self._info.save_dir, str(self._info.tag))

    def _change(self, engine: Any, **attributes: Any) -> None:
        """Set attributes of the engine; `_set_back` restores them."""
        for key, value in attributes.items():
            self._changed[key] = vars(engine).get(key, _NOTHING)
            setattr(engine, key, value)

    def _set_back(self) -> None:
        engine = self._engine()
        for key, value in self._changed.items() if engine is not None else ():
            if value is _NOTHING:
                vars(engine).pop(key, None)
            else:
                setattr(engine, key, value)
        self._changed = {}
        self._info = None

    def _begin(self, engine: Any) -> None:
        info, path = self._info, self._path()
        self._set_back()
        state = state_of(engine, self._values, self._kept)
        hooks = getattr(base_optimizer(engine), "register_step_pre_hook", None)
        options = {"timeout_s": self.timeout_s, **(_LAZY if hooks is not None or engine.optimizer is None else {})}
        if self._nebula is None:
            handle = checkpoint.async_save(path, state, host_buffer_bytes=self._host_buffer_bytes, **options)
        else:
            handle = self._nebula.save(str(info.tag), state, **options)
        writes_latest = info.save_latest and dist.get_rank() == 0
        self._running = _Running(info, handle, writes_latest=writes_latest, timeout_s=self.timeout_s)
        if hooks is not None:
            self._running.hold(hooks)


_NOTHING = object()
_AT_EXIT: weakref.WeakSet[Engine] = weakref.WeakSet()

_LOGGER = logging.getLogger("reshard_ckpt")

_LAZY: dict[str, Any] = {"staging": "lazy", "hold": "caller"}
"""The hook on the base optimizer's step waits for `staged`, so a save returns before anything is copied."""


@atexit.register
def _finish_all() -> None:
    for engine in list(_AT_EXIT):
        try:
            engine.finish()
        except CheckpointError:
            _LOGGER.exception("the last checkpoint of a DeepSpeed engine was not saved")


class _Running:
    """A save that is under way, and the steps that follow its commit."""

    def __init__(self, info: Any, handle: checkpoint.SaveHandle, *, writes_latest: bool, timeout_s: float) -> None:
        self.info, self._handle, self._timeout_s = info, handle, timeout_s
        self._hook: Any = None
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._writes_latest = writes_latest
        handle.add_done_callback(self._after)

    def hold(self, register: Callable[..., Any]) -> None:
        """Make the next step of the optimizer wait until all tensors are copied."""

        def wait(*_: Any) -> None:
            self._handle.staged()

        self._hook = register(wait)

    def _after(self, handle: checkpoint.SaveHandle) -> None:
        try:
            if self._writes_latest and not handle.failed():
                write_latest(self.info.save_dir, str(self.info.tag), timeout_s=self._timeout_s)
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def result(self) -> None:
        """Wait for the commit and for the new ``latest``; raise the error of either."""
        try:
            self._handle.result()
        finally:
            self._over.wait()
            if self._hook is not None:
                self._hook.remove()
        if self._error is not None:
            raise self._error
