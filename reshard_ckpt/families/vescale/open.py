"""Reading a folder of ``vescale.checkpoint`` (0.1, of 2024) as a checkpoint of this library: a catalog over its files.

1. ``model/`` is like a folder of DCP, with classes of veScale in its metadata. Names are those of the model.
2. ``optimizer/pp_<n>/`` is one for each pipeline stage. A path has the dtype of a gradient buffer, the parameter as a pair of
   model chunk and name, and the key of the state; its name here is ``optimizer.state.<name>.<key>``. Each entry is a box.
3. The fp32 master of a 16-bit weight has the key ``shard_casted_float16_groups``; it becomes the parameter ``model.<name>``. The
   16-bit weight is the master rounded; it becomes ``vescale.model.<name>``.
4. The optimizer saved the hyperparameters of its groups, but lists their members by numbers of one rank. If all groups of a stage
   have equal hyperparameters, these hold for all parameters of the stage. Otherwise the groups are unreadable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...plugins import CatalogBuilder, Format, Source, Storage, ValueKind
from ...plugins.dcp import KeyPath, Metadata, add_parts, is_written_by, read_nested, read_part, renamed
from ...plugins.errors import CorruptError, UnsupportedError
from ...plugins.groups import comparable, merge, named_group
from .names import GROUP_META, GROUPS, MASTER, MASTERED, MODEL, NAME, OPTIMIZER, STATE

_MODULE = "vescale.checkpoint.storage.filesystem"
_CLASSES = {(_MODULE, "_StorageInfo"): "_StorageInfo"}
_STAGE = re.compile(rf"({OPTIMIZER}/pp_(\d{{1,6}}))/.*")
_PARAMETER = re.compile(r"\((\d+), (['\"])(.*)\2\)")


def open_vescale(storage: Storage, key: str | None = None, *, as_saved: bool = False) -> Source | None:
    """Open a folder of ``vescale.checkpoint``; return None for anything else; see `Format.open`."""
    if key is not None:
        return None
    found = {int(match[2]): match[1] for key, _ in storage.list() if (match := _STAGE.fullmatch(key))}
    stages = dict(sorted(found.items()))  # the folder of each pipeline stage's optimizer, by number of the stage
    if not is_written_by(storage, (MODEL, *stages.values()), _MODULE, format=NAME):
        return None
    builder, folder = CatalogBuilder(NAME, storage.url), _Folder(storage, stages, as_saved=as_saved)
    add_parts(builder, storage, folder.parts())
    folder.add_groups(builder)
    return Source(storage, builder.finish(), NAME)


class _Folder:
    """Reads the metadata of a root's model and optimizer folders, and renames their entries to this library's names."""

    def __init__(self, storage: Storage, stages: Mapping[int, str], *, as_saved: bool) -> None:
        self.storage, self.as_saved = storage, as_saved
        absent = next((stage for stage in range(len(stages)) if stage not in stages), None)
        if absent is not None:
            raise CorruptError(f"{storage.url}: has {stages[max(stages)]} and no {OPTIMIZER}/pp_{absent}; copy it along")
        self.stages: list[Metadata] = []
        for folder in stages.values():
            saved = read_part(storage, folder, _CLASSES)
            if saved is None:
                raise CorruptError(f"{storage.url}: {folder} has no metadata; use another checkpoint")
            self.stages.append(saved)

    def parts(self) -> list[Metadata]:
        """Return the metadata of the model, if any, and of the optimizer of each pipeline stage, under this library's paths.

        Entries of several stages, such as state of tied weights, are in the metadata of each.
        """
        url = self.storage.url
        stages = [renamed(saved, self._state_path, f"{url}: {OPTIMIZER}") for saved in self.stages]
        masters = {str(path[1]) for saved in stages for path in saved.paths.values() if path[0] == MODEL}
        model = read_part(self.storage, MODEL, _CLASSES)
        if model is None:
            return stages

        def model_path(path: KeyPath) -> KeyPath:
            name = ".".join(map(str, path))
            return (MASTERED, MODEL, name) if name in masters else (MODEL, name)

        return [renamed(model, model_path, f"{url}: {MODEL}"), *stages]

    def _state_path(self, path: KeyPath) -> KeyPath | None:
        if path[0] == GROUP_META:
            return None
        if len(path) < 3 or (match := _PARAMETER.fullmatch(str(path[1]))) is None:
            raise CorruptError(
                f"{self.storage.url}: {path!r:.200} is not state of veScale's DistributedOptimizer; use another copy"
            )
        if path[2:] == (MASTER,) and not self.as_saved:
            return MODEL, match[3]
        return OPTIMIZER, STATE, match[3], *path[2:]

    def add_groups(self, builder: CatalogBuilder) -> None:
        """Add the optimizer's groups to a catalog, one for each set of hyperparameters; or the error, if they cannot be read."""
        name, found = f"{OPTIMIZER}.{GROUPS}", []
        with builder.reading(name):
            for number, saved in enumerate(self.stages):
                found.append((f"stage {number}", [named_group(self._hyperparameters(saved, number), _members(saved))]))
            if found:
                builder.value([OPTIMIZER, GROUPS], merge(found, name=name), ValueKind.PARAM_GROUPS)

    def _hyperparameters(self, saved: Metadata, stage: int) -> dict[str, Any]:
        """Return the hyperparameters that all groups of a stage have in common, without their members.

        Raise `UnsupportedError` if the groups have different hyperparameters.
        """
        # Paths are ``param_group_meta``, number of the group, hyperparameter.
        entries = ((saved.paths[fqn], extent) for fqn, extent in saved.values.items())
        listed = read_nested(self.storage, {path[1:]: extent for path, extent in entries if path[0] == GROUP_META})
        if not isinstance(listed, list) or not all(isinstance(group, dict) for group in listed):
            raise CorruptError(f"{self.storage.url}: {OPTIMIZER}/pp_{stage} has no list of groups; use another checkpoint")
        plain = [{key: value for key, value in group.items() if key != "params"} for group in listed] or [{}]
        if len({comparable(group) for group in plain}) > 1:
            raise UnsupportedError(
                f"{self.storage.url}: the {len(plain)} groups of {OPTIMIZER}/pp_{stage} have different hyperparameters, and "
                "veScale saved their members by numbers of one rank, so nobody knows whose they are; pass "
                f"ignore=['{OPTIMIZER}.{GROUPS}']"
            )
        return plain[0]


def _members(saved: Metadata) -> list[str]:
    """List the names of a stage's parameters, in the order of its metadata."""
    found = (_PARAMETER.fullmatch(str(path[1])) for path in saved.paths.values() if len(path) > 2)
    return list(dict.fromkeys(match[3] for match in found if match))


FORMAT = Format(
    NAME,
    "a folder of vescale.checkpoint, which has model/.metadata or optimizer/pp_0/.metadata of its own classes",
    open_vescale,
    order=20,
    takes=("as_saved",),
)
