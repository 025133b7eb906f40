"""The four functions by which Accelerate and the ``Trainer`` of transformers save and load FSDP modules, through this library.

1. `install` binds them in the four modules that call them by a name of their own.
2. A folder has Accelerate's own name: ``pytorch_model_fsdp_0`` for the model, ``optimizer_0`` for the optimizer. So a folder that
   Accelerate wrote with DCP loads too.
3. The optimizer is saved beside the module that names its parameters, and the module is left out of the files.
4. ``FULL_STATE_DICT`` asks for one file of ``torch.save``: Accelerate's own functions write and read it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from ...plugins import checkpoint
from ...plugins.errors import UsageError
from ...plugins.names import unwrapped
from ...plugins.packages import Replaced, needed
from .background import BACKGROUND

_OWNER = "accelerate.utils.fsdp_utils"
_MODULES = ("accelerate.utils", "accelerate.accelerator", "transformers.trainer")


class LoadResult(NamedTuple):
    """The result of `load_fsdp_model`, with the fields of the result of ``load_state_dict``.

    Both are empty. A load with missing or unexpected names raises an error instead; with `adapter_only`, frozen parameters may be
    missing.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def install() -> None:
    """Let Accelerate and the ``Trainer`` save and load FSDP modules and their optimizers through this library.

    Raises
    ------
    UsageError
        Accelerate is not installed, or is a release without these functions.
    """
    with needed("accelerate", "accelerate>=1.15"):
        importlib.import_module("accelerate.accelerator")
        _REPLACED.install(_FUNCTIONS)


def uninstall() -> None:
    """Undo `install`: Accelerate and the ``Trainer`` use Accelerate's own functions again."""
    _REPLACED.uninstall()


def _owners() -> list[Any]:
    # A module that is imported later, as the Trainer may be, finds the functions in the utils of Accelerate.
    return [importlib.import_module(_OWNER), *(sys.modules[name] for name in _MODULES if name in sys.modules)]


_REPLACED = Replaced(_owners)


def _unless_full(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that replaces one of Accelerate's: with ``FULL_STATE_DICT`` it calls Accelerate's own instead."""

    @wraps(function)
    def call(fsdp_plugin: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        if fsdp_plugin.state_dict_type.name != "FULL_STATE_DICT":
            return function(fsdp_plugin, accelerator, *args, **kwargs)
        num = accelerator.num_processes
        if (
            function.__name__ == "save_fsdp_model"
            and num > 1
            and fsdp_plugin.fsdp_version == 1
            and accelerator.device.type == "cpu"
        ):
            # FSDP1 "moves" parameters to the CPU, which copies nothing here, and frees them before they are read.
            raise UsageError(
                f"FULL_STATE_DICT: torch cannot gather FSDP1's parameters on {num} processes of a CPU; pass "
                'state_dict_type="SHARDED_STATE_DICT" or fsdp_version=2, and `reshard-ckpt convert` the folder to one file'
            )
        return _REPLACED.stock[function.__name__](fsdp_plugin, accelerator, *args, **kwargs)

    return call


@_unless_full
def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a module as ``pytorch_model_fsdp_<index>``; with `adapter_only` without its frozen parameters.

    Raises
    ------
    UsageError
        ``FULL_STATE_DICT`` with FSDP1 on several processes of a CPU.
    """
    frozen = _frozen(model) if adapter_only else []
    BACKGROUND.save(_folder(output_dir, "pytorch_model_fsdp", model_index), {"model": model}, exclude=frozen)


@_unless_full
def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> LoadResult:
    """Load a module in place, from ``pytorch_model_fsdp_<index>``, which any number of ranks may have saved."""
    BACKGROUND.wait()
    frozen = _frozen(model) if adapter_only else []
    checkpoint.load(_folder(input_dir, "pytorch_model_fsdp", model_index), {"model": model}, allow_missing=frozen)
    return LoadResult([], [])


@_unless_full
def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: str,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save an optimizer as ``optimizer_<index>``, under the names of its parameters."""
    BACKGROUND.save(_folder(output_dir, "optimizer", optimizer_index), _state(model, optimizer), exclude=["model"])


@_unless_full
def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: str,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load an optimizer in place, even if it has never stepped, from a checkpoint of any number of ranks."""
    BACKGROUND.wait()
    checkpoint.load(_folder(input_dir, "optimizer", optimizer_index), _state(model, optimizer), ignore=["model"])


_FUNCTIONS = {f.__name__: f for f in (save_fsdp_model, load_fsdp_model, save_fsdp_optimizer, load_fsdp_optimizer)}


def _folder(path: str, name: str, index: int) -> str:
    below = f"{name}_{index}"  # Accelerate takes the folder itself, too
    return str(path) if os.path.basename(os.path.normpath(path)) == below else os.path.join(path, below)


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": getattr(optimizer, "optimizer", optimizer)}  # without AcceleratedOptimizer


def _frozen(model: Any) -> list[str]:
    return [f"model.{unwrapped(name)}" for name, parameter in model.named_parameters() if not parameter.requires_grad]
