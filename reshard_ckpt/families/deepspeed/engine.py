"""The checkpoint engine that DeepSpeed calls: each save of a DeepSpeed engine becomes one save of this library.

1. DeepSpeed calls `Engine.create`, and then `Engine.save` for each file that it would write. The last of these calls on a rank
   begins one save of the engine's whole state (`state_of`): tensors in the layout of the engine (`engine_state`), live; buffers,
   copied, from the first of the ranks that have the same layers; DeepSpeed's and the user's values, from rank 0. The other calls
   write nothing.
2. Training goes on. A step of the optimizer waits until the tensors that it changes are copied.
3. After the commit, rank 0 replaces the file ``latest``. If a save is killed before that, ``latest`` still has the old tag.

Before DeepSpeed 0.17.1, `create` and `commit` receive only the tag, DeepSpeed itself writes ``latest`` at once, and ``destroy``
does not call the checkpoint engine. There, `OldMethods` replaces two methods of the engine: ``save_checkpoint`` notes the folder
of the save, and stops DeepSpeed from writing ``latest``; ``destroy`` waits for a save that is under way.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import re
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...plugins import checkpoint, is_plain, open_storage
from ...plugins.errors import CheckpointError, UnsupportedError
from ...plugins.trees import map_tree
from .engine_state import EngineState, base_optimizer, refuse_unsupported
from .loading import find_saved
from .model_parallel import num_tensor_parallel
from .names import LATEST
from .nebula import NebulaRun
from .places import CURE_OF_ENGINES
from .values import NOT_VALUES, Path


def copied(value: Any) -> Any:
    """Copy the tensors inside a value of the user's ``client_state``, because the user may change them during the save."""

    def change(path: Path, node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return node.detach().clone()
        return copy.copy(node) if isinstance(node, Mapping) and type(node) is not dict else node  # such as a Counter

    return map_tree(change, value)


def state_of(engine: Any, values: Mapping[str, Any], kept: frozenset[str] | None) -> dict[str, Any]:
    """Return the state to save: this rank's tensors, the buffers if this rank is the first with them, values on rank 0.

    Parameters
    ----------
    kept
        The names in the module that DeepSpeed would save: not all of them with ``exclude_frozen_parameters``. None means all.
    """
    held = EngineState(engine)
    model, state = held.tensors(with_state=True)
    buffers = held.buffers(of_experts_alone=not _is_first(engine))
    model |= {name: buffer.detach().clone() for name, buffer in buffers.items()}
    if kept is not None:
        kept = frozenset(map(held.name, kept))
        model = {name: part for name, part in model.items() if name in kept}
    tree: dict[str, Any] = {"model": model} if model else {}
    if engine.optimizer is not None:
        tree["optimizer"] = {"state": state, "param_groups": held.groups()}
    if dist.get_rank() == 0:
        tree["deepspeed"] = _plain_values(values, engine.optimizer)
    return tree


def _is_first(engine: Any) -> bool:
    """Tell whether this rank is the first of the ranks that hold the same layers.

    That rank saves their buffers; the other ranks save only buffers of experts.
    """
    from deepspeed.utils import groups

    if groups._get_sequence_data_parallel_rank() != 0:
        return False
    return num_tensor_parallel(engine) < 2 or dist.get_rank(group=groups.get_tensor_model_parallel_group()) == 0


_OF_OPTIMIZER = ("dynamic_loss_scale", "overflow", "clip_grad", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor",
                 "scale_window")  # fmt: skip


def _plain_values(values: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return the values to save: DeepSpeed's, the user's, and the optimizer's own. A config that cannot be encoded is left out.

    Any other value that is not plain is refused later, by the save.
    """
    found = dict(values)
    if not is_plain(found.get("ds_config")):  # it may hold objects, and a job that resumes has its own config
        found.pop("ds_config", None)
    own: dict[str, Any] = {}
    if optimizer is not None:
        state = optimizer.state_dict()
        own = {key: state[key] for key in _OF_OPTIMIZER if key in state}
        if "loss_scaler" in state:
            own["loss_scaler"] = dict(vars(state["loss_scaler"]))
        if "zero_stage" in state:
            own["zero_stage"] = int(state["zero_stage"])
    return {**found, "optimizer": own} if own else found


REPLACED = ("save_checkpoint", "destroy")


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """The arguments of the save in progress, with the fields of ``CheckpointCommitInfo`` in newer DeepSpeed."""

    tag: str
    save_dir: str
    save_latest: bool


class OldMethods:
    """The replaced methods of one engine; constructing it replaces them.

    Attributes
    ----------
    info
        The save that DeepSpeed's method is carrying out now; None between saves.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self.info: CommitInfo | None = None
        for name in REPLACED:
            setattr(engine, name, getattr(self, name))

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save with DeepSpeed's own method, but let it write no ``latest``; meanwhile `info` has the folder and the tag."""
        engine = self._engine()
        assert engine is not None
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        self.info = CommitInfo(tag, save_dir, save_latest)
        try:
            stock = type(engine).save_checkpoint
            return stock(engine, save_dir, tag, client_state or {}, False, exclude_frozen_parameters)
        finally:
            self.info = None

    def destroy(self) -> None:
        """Wait for a save that is under way, then call DeepSpeed's own ``destroy``."""
        engine = self._engine()
        assert engine is not None
        engine.checkpoint_engine.cleanup()
        type(engine).destroy(engine)


_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_OPTIMIZER = re.compile(r".*optim_states\.pt")
_LAYER = re.compile(r"layer_\d+.*model_states\.pt")


class Engine:
    """A checkpoint engine with the methods that DeepSpeed calls, for one DeepSpeed engine.

    Parameters
    ----------
    engine
        The DeepSpeed engine whose state is saved.
    stock
        DeepSpeed's own checkpoint engine, which this one replaces. It still handles files that are not a checkpoint, such as
        those of ``save_16bit_model``.
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
        self._undo = ExitStack()
        self._running: _Running | None = None
        self.old: OldMethods | None = None
        _AT_EXIT.add(self)

    def create(self, info: Any) -> None:
        """Begin a checkpoint: wait for the commit of the last one, and make DeepSpeed call `save` on every rank."""
        self._set_back()
        if self.old is not None:
            info = self.old.info or info
        # DeepSpeed passes the name of the one file of ``save_16bit_model`` in the place of a tag.
        if not hasattr(info, "save_dir") or str(info.tag).endswith((".bin", ".pt", ".safetensors")):
            self.stock.create(info)
            return
        engine = self._of()
        refuse_unsupported(engine)
        self.finish()
        self._info, self._values, self._kept = info, {}, None
        self._change(
            engine,
            save_non_zero_checkpoint=True,
            has_moe_layers=False,  # else DeepSpeed would copy all experts, to write them to files of their own
            _get_zero_frozen_param_attributes=lambda function: {},  # and all frozen parameters: the live ones are saved here
        )

    def save(self, state_dict: Any, path: str) -> None:
        """Receive the content of one file from DeepSpeed. The last file of a rank begins the save of the whole state."""
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
            raise UnsupportedError(f"{path}: DeepSpeed saves a file of an unknown name; {CURE_OF_ENGINES}")
        self._begin(engine)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load one file with DeepSpeed's own checkpoint engine."""
        return self.stock.load(path, map_location=map_location)

    def commit(self, info: Any) -> bool:
        """Wait for the commit of the checkpoint, and on rank 0 for its ``latest``; return True."""
        if self._running is None or info != self._running.info:
            return bool(self.stock.commit(info))
        self.finish()
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make the folder `path`, because DeepSpeed asks its checkpoint engine to."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Tell DeepSpeed which rank writes content that all data-parallel ranks hold. Here each rank writes a part anyway."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Return True: the commit comes some time after `save`, and only then is ``latest`` written."""
        return True

    def set_commit_info(self, info: Any) -> None:
        """Do nothing: each save commits by itself, and `get_commit_info` tells DeepSpeed so."""

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
        """Wait for the commit of the last save, and on rank 0 for its ``latest``; raise the error of a save that failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _of(self) -> Any:
        engine = self._engine()
        assert engine is not None
        return engine

    def _path(self) -> str:
        return os.path.join(self._info.save_dir, str(self._info.tag))

    def _change(self, engine: Any, **attributes: Any) -> None:
        """Set attributes of the engine, and remember the old ones, so that `_set_back` can restore them."""
        for key, value in attributes.items():
            if key in vars(engine):
                self._undo.callback(setattr, engine, key, vars(engine)[key])
            else:
                self._undo.callback(vars(engine).pop, key, None)
            setattr(engine, key, value)

    def _set_back(self) -> None:
        self._undo.close()
        self._info = None

    def _begin(self, engine: Any) -> None:
        info, path = self._info, self._path()
        self._set_back()
        state = state_of(engine, self._values, self._kept)
        base = base_optimizer(engine)
        # DeepSpeed changes the momentum of Muon before torch's step, where no hook waits: such a save copies at once.
        hooks = None if "muon" in type(base).__name__.lower() else getattr(base, "register_step_pre_hook", None)
        options = {"timeout_s": self.timeout_s, **(_LAZY if hooks is not None or engine.optimizer is None else {})}
        if self._nebula is None:
            handle = checkpoint.async_save(path, state, host_buffer_bytes=self._host_buffer_bytes, **options)
        else:
            handle = self._nebula.save(str(info.tag), state, **options)
        writes_latest = info.save_latest and dist.get_rank() == 0
        self._running = _Running(info, handle, writes_latest=writes_latest, timeout_s=self.timeout_s)
        if hooks is not None:
            self._running.hold(hooks)


_AT_EXIT: weakref.WeakSet[Engine] = weakref.WeakSet()
_LOGGER = logging.getLogger("reshard_ckpt")
_LAZY: dict[str, Any] = {"staging": "lazy", "hold": "caller"}
"""Options of a save that returns before anything is copied. The optimizer's next step waits for the copy (`_Running.hold`)."""


@atexit.register
def _finish_all() -> None:
    for engine in list(_AT_EXIT):
        try:
            engine.finish()
        except CheckpointError:
            _LOGGER.exception("the last checkpoint of a DeepSpeed engine was not saved")


class _Running:
    """A background save that is under way, and the steps that follow its commit, such as writing ``latest``."""

    def __init__(self, info: Any, handle: checkpoint.SaveHandle, *, writes_latest: bool, timeout_s: float) -> None:
        self.info, self._handle, self._timeout_s = info, handle, timeout_s
        self._hook: Any = None
        self._latest: Future[None] = Future()
        self._writes_latest = writes_latest
        handle.add_done_callback(self._after)

    def hold(self, register: Callable[..., Any]) -> None:
        """Register a hook that makes the next step of the optimizer wait until all tensors are copied."""

        def wait(*_: Any) -> None:
            self._handle.staged()

        self._hook = register(wait)

    def _after(self, handle: checkpoint.SaveHandle) -> None:
        try:
            if self._writes_latest and not handle.failed():
                write_latest(self.info.save_dir, str(self.info.tag), timeout_s=self._timeout_s)
            self._latest.set_result(None)
        except BaseException as error:
            self._latest.set_exception(error)

    def result(self) -> None:
        """Wait for the commit, and on rank 0 for the new ``latest``, if it is to be written; raise the error of either."""
        try:
            self._handle.result()
        finally:
            self._latest.exception()  # waits, and raises nothing: an error of the save counts first
            if self._hook is not None:
                self._hook.remove()
        self._latest.result()


def write_latest(root: str, tag: str, *, timeout_s: float = 600.0) -> None:
    """Replace the tag in the file ``latest`` of a DeepSpeed root, atomically."""
    with open_storage(root, timeout_s=timeout_s) as storage:
        storage.publish(LATEST[0], tag.encode())
