"""The checkpoint manager that torchtitan's Trainer builds in the place of its own, over a `Manager` of this library.

1. The state is live: the parts of the model, the optimizers in torchtitan's container, and the other states. A model that was cut
   into pipeline stages has the names of the whole model.
2. Step 100 is ``<folder>/step-100``, as in torchtitan. A folder of this name that torchtitan wrote with DCP is a step too.
3. Saves in the background are lazy: `maybe_wait_for_staging`, which the Trainer calls before each step of the optimizer, waits
   until the state may change. ``keep_latest_k`` is applied after a commit, never before.
4. torchtitan's own code reads and writes Hugging Face folders.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...plugins import checkpoint
from ...plugins.errors import UsageError
from ...plugins.packages import needed

with needed("torchtitan", "torchtitan>=0.3"):
    from torch.distributed.checkpoint.stateful import Stateful
    from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER, CheckpointManager
    from torchtitan.components.optimizer import OptimizersContainer


class ReshardCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """The states of a Trainer as checkpoints of this library; see torchtitan's ``CheckpointManager`` for parameters and calls."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The options of torchtitan's checkpoint manager, and further ones of `checkpoint.Manager`.

        Attributes
        ----------
        manager
            Further options of `checkpoint.Manager`, such as ``{"incremental": True}``.
        """

        manager: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Any, **parts: Any) -> None:
        # torchtitan's own manager would start a thread that deletes by age, and a process group to save in.
        super().__init__(replace(config, keep_latest_k=0, async_mode="disabled"), **parts)
        if not self.enable:
            return
        self._is_async = config.async_mode != "disabled"
        self.save_future: checkpoint.SaveHandle | None = None
        self._manager: Any = checkpoint.Manager(
            self.folder,
            **{"name": "step-{}", "keep_last": config.keep_latest_k or None, "read_only": config.load_only, **config.manager},
        )

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        if last_step and self.last_save_in_hf:
            self._save_last_step(curr_step)
        elif last_step and self.last_save_model_only:
            self._manager.save(curr_step, {MODEL: self._exported()})
        elif last_step or not self._is_async:
            self._manager.save(curr_step, self._state())
        else:
            self.save_future = self._manager.async_save(curr_step, self._state(), staging="lazy")
        return True

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        latest = self._manager.latest()
        if step == -1 and latest is None:
            return bool(super()._load())  # from `initial_load_path`, or nothing
        state = self._state_to_load(model_only=(latest if step == -1 else step) == 0)
        if step == -1:
            return self._manager.load_latest(state) is not None
        self._manager.load(step, state)
        return True

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load the initial checkpoint: a folder of any format that this library opens, or torchtitan's Hugging Face folders."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        else:
            model_only = self.initial_load_model_only
            # The weights alone may be an export in `export_dtype`, which torchtitan's own manager casts too.
            checkpoint.load(checkpoint_id, self._state_to_load(model_only=model_only), cast=model_only)

    def _find_load_step(self, folder: str = "") -> int:
        return -1 if (latest := self._manager.latest()) is None else latest

    def _maybe_wait_for_staging(self) -> None:
        if self.save_future is not None:
            self.save_future.staged()

    def _wait_for_saving(self) -> None:
        handle, self.save_future = self.save_future, None
        assert handle is not None
        handle.result()

    def _close(self) -> None:
        manager, self._manager = getattr(self, "_manager", None), None  # `__del__` closes again, also if `__init__` raised
        if manager is not None:
            manager.close()

    def _state(self) -> dict[str, Any]:
        """Return torchtitan's states as a state to save: the model's parts and optimizers live, without states that are None."""
        state = {name: part for name, part in self.states.items() if part is not None}
        state[MODEL] = self.states[MODEL].model
        optimizers = self.states[OPTIMIZER]
        if type(optimizers).state_dict is OptimizersContainer.state_dict:  # else it has a state of its own
            state[OPTIMIZER] = list(optimizers)
        return state

    def _state_to_load(self, *, model_only: bool) -> dict[str, Any]:
        if model_only:
            return {MODEL: self.states[MODEL].model}
        unknown = sorted({*self.exclude_from_loading} - {*self.states})
        if unknown:
            raise UsageError(f"exclude_from_loading={unknown}: not states of this job; name some of {sorted(self.states)}")
        state = {name: part for name, part in self._state().items() if name not in self.exclude_from_loading}
        if hasattr(state.get(DATALOADER), "dp_world_size"):
            state[DATALOADER] = _Loader(state[DATALOADER])
        return state

    def _exported(self) -> dict[str, Any]:
        """Return the state dict of the model, with its floating-point tensors converted to ``export_dtype``."""
        return {
            name: part.to(self.export_dtype) if isinstance(part, torch.Tensor) and part.is_floating_point() else part
            for name, part in self.states[MODEL].state_dict().items()
        }


class _Loader(Stateful):
    """The state of torchtitan's data loader. It loads only in a job with the same number of data-parallel ranks."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {"world_size": self._loader.dp_world_size}  # the states of the ranks come beside it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved, here = state["world_size"], self._loader.dp_world_size
        if saved != here:
            raise UsageError(
                f"{DATALOADER}: saved with {saved} data-parallel ranks, this job has {here}, and torchtitan's loader goes on "
                f'with the same number alone; pass exclude_from_loading=["{DATALOADER}"] to begin its data anew, or use a '
                "loader whose state does not depend on the rank"
            )
        self._loader.load_state_dict(state)
