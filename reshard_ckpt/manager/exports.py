"""The exports of a run: each committed step also as a folder that Hugging Face's libraries load, written in the background.

1. After a commit, rank 0 queues the step. One thread exports one step at a time into ``safetensors/`` below the step's folder.
   It reads the checkpoint back as a stream, so memory is bounded at any size, and every block is verified.
2. The folder appears whole, with a note of its save. A commit removes the export of the save that it replaces, and pruning a step
   removes the export too. A step is not pruned while it is exported; one that was pruned before its turn is passed over.
3. A failed export is a warning: the checkpoint itself is committed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import nn

from ..checkpoint.converting import MODEL, export
from ..core.catalog.model import Catalog
from ..engine.common.files import open_catalog
from ..errors import CheckpointError, CheckpointNotFound, UsageError
from ..format.dtypes import TORCH_DTYPES
from ..format.files import EXPORT, export_note_key
from ..storage import Storage, open_storage
from ..storage.protocol import write_file

_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module")
"""Attributes in which wrappers such as DDP keep the module that they wrap."""


class Exports:
    """The exports of one manager; only rank 0 writes them.

    Parameters
    ----------
    also
        The format of the exports.
    root
        The root of the run.
    timeout_s
        As for `open_storage`.
    """

    def __init__(self, also: str, root: str, timeout_s: float) -> None:
        if also != EXPORT:
            raise UsageError(f"also={also!r}: there is {EXPORT!r}, an export for Hugging Face's libraries; pass that, or None")
        if root.startswith("memory://"):
            raise UsageError(
                f"also={also!r}: exports are files or objects, and {root} is memory; pass a folder, or an s3:// path"
            )
        self._timeout_s = timeout_s
        self._key, self._documents = MODEL, dict[str, Callable[[Catalog], str]]()
        self._queue = ThreadPoolExecutor(1, "reshard_ckpt export")

    def find_model(self, state: Mapping[str, Any]) -> None:
        """Find the model in a state that is about to be saved, and remember its key and its config for the export.

        Raise `UsageError` if the state has no key ``model``, and not exactly one module.
        """
        found = {key: value for key, value in state.items() if key == MODEL or next(_modules(value), None) is not None}
        if MODEL not in found and len(found) != 1:
            raise UsageError(
                f"also={EXPORT!r}: the state has no key {MODEL!r}, and {len(found)} modules ({', '.join(map(str, found))}), so "
                f"the model to export is unknown; save the model under the key {MODEL!r}"
            )
        self._key = MODEL if MODEL in found else next(iter(found))
        model = next((module for module in _modules(found[self._key]) if hasattr(module, "config")), None)
        configs = {"config.json": "config", "generation_config.json": "generation_config"}
        written = {key: getattr(model, name, None) for key, name in configs.items()}
        self._documents = {
            key: partial(_config, config, _class_name(type(model)) if key == "config.json" else None)
            for key, config in written.items()
            if hasattr(config, "to_json_string")
        }

    def begin(self, path: str, done: Callable[[], None]) -> None:
        """Queue the export of a committed step. `done` is called in the background once it is over, whether or not it failed."""
        key, documents = self._key, self._documents  # those of this step: the next one may have others

        def write_beside(catalog: Catalog, storage: Storage) -> None:
            # The note comes first: in a store of objects, it marks the files of a killed export.
            write_file(storage, export_note_key(catalog.lineage_id).partition("/")[2], b"")
            for name, text in documents.items():
                write_file(storage, name, text(catalog).encode())

        def export_step() -> None:
            before = _save_id(path, self._timeout_s)
            try:
                export(path, f"{path}/{EXPORT}", root=key, write_beside=write_beside, timeout_s=self._timeout_s)
            except Exception as error:
                now = _save_id(path, self._timeout_s)
                if now is not None and (now == before or "" in (now, before)):  # else pruned or saved anew meanwhile
                    warnings.warn(
                        f"{path}: saved, but not exported to {EXPORT}: {type(error).__name__}: {error}; to export it, run "
                        f"reshard-ckpt convert {path} {path}/{EXPORT} --root {key}",
                        stacklevel=2,
                    )
            finally:
                done()

        self._queue.submit(export_step)

    def wait(self) -> None:
        """Wait until no export is running or queued."""
        self._queue.submit(int).result()

    def close(self, *, wait: bool) -> None:
        """End the thread of the exports: with `wait` after all queued ones, else after the one in progress."""
        self._queue.shutdown(wait=wait, cancel_futures=not wait)


def _modules(value: Any) -> Iterator[nn.Module]:
    """Yield a module (or each stage of a list), followed by the modules that it wraps, from the outermost to the innermost."""
    for module in value if isinstance(value, list | tuple) else [value]:
        while isinstance(module, nn.Module):
            yield module
            inner = [part for name, part in module.named_children() if name in _WRAPPED]
            module = inner[0] if inner else None


def _class_name(kind: type) -> str:
    # FSDP2 makes a subclass of the module's class, named FSDP and its name.
    is_made = kind.__name__.startswith("FSDP") and kind.__mro__[1].__name__ == "FSDPModule"
    return kind.__mro__[2].__name__ if is_made else kind.__name__


def _config(config: Any, name: str | None, catalog: Catalog) -> str:
    """Return a model's transformers config as JSON text.

    If `name` is given, it is written there as the model's class, with the dtype of the catalog's first floating-point tensor.
    """
    if name is None:
        return str(config.to_json_string())
    values = json.loads(config.to_json_string())
    values["architectures"] = [name]
    dtypes = (TORCH_DTYPES[catalog.dtype(catalog.index(tensor))] for tensor in catalog.names)
    for dtype in [dtype for dtype in dtypes if dtype.is_floating_point][:1]:
        values["torch_dtype" if "torch_dtype" in values else "dtype"] = str(dtype).removeprefix("torch.")
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _save_id(path: str, timeout_s: float) -> str | None:
    """Return the id of the save whose catalog is at a path; None without a catalog, ``""`` if it cannot be read."""
    try:
        with open_storage(path, timeout_s=timeout_s) as storage:
            return open_catalog(storage).lineage_id
    except CheckpointNotFound:
        return None
    except CheckpointError:
        return ""
