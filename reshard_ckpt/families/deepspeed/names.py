"""The names that DeepSpeed gives to files and to experts, and the names of its tensors and values here.

Here, parameters are named ``model.…``, optimizer state by its parameter, and everything else ``deepspeed.…``.

A *root* has a file ``latest`` with a *tag*: the name of the folder of one checkpoint. That folder holds:

- ``mp_rank_MM_model_states.pt``, the module and all values, one for each model-parallel rank (of tensors or a pipeline); with
  ZeRO-3 ``zero_pp_rank_D_mp_rank_MM_model_states.pt``, one for each rank;
- ``[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt``, the part of the optimizer that data-parallel rank D holds;
- ``layer_NN[-model_MM]-model_states.pt``, one layer of a pipeline;
- ``layer_L_expert_E_mp_rank_MM_model_states.pt``, one expert of a MoE layer.

A *universal* folder has a folder ``zero`` instead of the optimizer's files, with a folder for each parameter.

Consecutive data-parallel ranks divide the experts of a layer evenly. In the names of parameters, each rank numbers its experts
from 0; the number in the whole model follows from the rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...plugins import CATALOG_KEY, Storage
from ...plugins.errors import CheckpointError, CorruptError
from ...plugins.names import StateLink

NAME = "deepspeed"
"""The name of DeepSpeed's format, as in ``inspect``."""
ROOT = "deepspeed"
"""The top-level key of all values that DeepSpeed or the user saved."""
MODEL, OPTIMIZER = "model", "optimizer"
STATE, GROUPS = "state", "param_groups"
MASTER = "fp32"
"""The key of the fp32 master weights among the keys of a flat group's tensors, beside ``exp_avg`` and the like."""


def parameter_name(fqn: str) -> str:
    """Return the name of a parameter or buffer, given its FQN."""
    return f"{MODEL}.{fqn}"


def state_link(fqn: str, key: str) -> StateLink:
    """Return the link between a tensor or value of optimizer state, such as ``exp_avg``, and the parameter with this FQN."""
    return StateLink(OPTIMIZER, fqn, key, parameter_name(fqn))


LATEST = ("latest", "latest_universal")
UNIVERSAL_STATE = "zero/optimizer_state.pt"
_MAX_TAG_BYTES = 4096
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d{1,9})_)?mp_rank_(?P<mp>\d{2,9})_model_states\.pt")
_OPTIM = re.compile(r"(?P<prefix>(?:bf16_|fp16_)?)zero_pp_rank_(?P<dp>\d{1,9})_mp_rank_(?P<mp>\d{2,9})_?optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d{2,9})(?:-model_(?P<mp>\d{2,9}))?-model_states\.pt")
_EXPERT_FILE = re.compile(r"(?:layer_\d+_expert_\d+|expp_rank_\d+|expert_\d+)_mp_rank_\d+_\w+\.pt")
Rank = tuple[int, int]
"""The number of a model-parallel rank, and of a data-parallel rank."""


@dataclass(frozen=True, slots=True)
class TagFiles:
    """The files of one DeepSpeed checkpoint, as keys in its store.

    Attributes
    ----------
    models, optimizers
        The files of model states, and of optimizers, by model-parallel and data-parallel rank.
    layers
        The files of layers, by number of the layer and tensor-parallel rank.
    experts
        The files of experts.
    universal
        The files of a universal folder, by parameter and key of its state; None for any other folder.
    """

    models: Mapping[Rank, str]
    optimizers: Mapping[Rank, str]
    layers: Mapping[Rank, str]
    experts: tuple[str, ...]
    universal: Mapping[tuple[str, str], str] | None = None

    @property
    def num_models(self) -> int:
        """The number of model-parallel ranks that saved this checkpoint."""
        return 1 + max(mp for mp, _ in self.models)


def latest_tag(storage: Storage) -> str | None:
    """Return the tag that the file ``latest`` names; None if the folder is not a root.

    Raise `CorruptError` if the folder of that tag is not there.
    """
    for key in LATEST:
        size = storage.size(key)
        if size is None or not 0 < size <= _MAX_TAG_BYTES:
            continue
        tag = storage.read(key, limit=_MAX_TAG_BYTES).decode(errors="replace").strip()
        if _is_checkpoint(storage, tag):
            return tag
        if any(_is_ours(name) for folder in storage.folders() for name in _names_in(storage, folder)):
            raise CorruptError(
                f"{storage.url}: {key} names {tag!r:.200}, where no checkpoint is; pass the path of another one below"
            )
    return None


def _is_checkpoint(storage: Storage, tag: str) -> bool:
    if not tag or tag.startswith(("/", ".")) or "\\" in tag or "//" in tag:
        return False
    try:
        marks = (f"{tag}/{CATALOG_KEY}", f"{tag}/{UNIVERSAL_STATE}", f"{tag}/mp_rank_00_model_states.pt")
        return any(storage.size(key) is not None for key in marks) or any(map(_is_ours, _names_in(storage, tag)))
    except CheckpointError:
        return False  # the file has other content than the name of a folder


def _names_in(storage: Storage, folder: str = "") -> list[str]:
    """List the names of the files directly in a folder."""
    below = f"{folder}/" if folder else ""
    names = (key[len(below) :] for key, _ in storage.list(folder))
    return [name for name in names if "/" not in name]


def _is_ours(name: str) -> bool:
    return bool(_MODEL.fullmatch(name) or _OPTIM.fullmatch(name))


def tag_files(storage: Storage) -> TagFiles | None:
    """Find the files of a checkpoint; return None if the folder is not one of DeepSpeed.

    Raise `CorruptError` if a file is missing, or the folder has files of two saves.
    """
    names = _names_in(storage)
    models = {_rank(m): m[0] for m in map(_MODEL.fullmatch, names) if m}
    optimizers = [m for m in map(_OPTIM.fullmatch, names) if m]
    if not models and not optimizers:
        return None
    where = storage.url
    if not models:
        raise CorruptError(f"{where}: has {optimizers[0][0]}, but no file of model states; copy the rest of it")
    # A run that changed its precision may leave files with another prefix in the folder: these are of another save.
    prefixes = {m["prefix"] for m in optimizers}
    if len(prefixes) > 1:
        raise CorruptError(
            f"{where}: has optimizer files of {len(prefixes)} saves, some beginning with bf16_; move those of one to "
            "another folder"
        )
    layers = {(int(m["layer"]), int(m["mp"] or 0)): m[0] for m in map(_LAYER.fullmatch, names) if m}
    experts = tuple(name for name in names if _EXPERT_FILE.fullmatch(name))
    universal = _universal_files(storage) if storage.size(UNIVERSAL_STATE) is not None else None
    found = TagFiles(models, {_rank(m): m[0] for m in optimizers}, layers, experts, universal)
    _check_complete(found, where)
    return found


def _universal_files(storage: Storage) -> dict[tuple[str, str], str]:
    """Find the files of a universal folder, by parameter and key."""
    found = {}
    for key, _ in storage.list("zero"):
        _, *name, file = key.split("/")
        if name and file.endswith(".pt"):
            found["/".join(name), file.removesuffix(".pt")] = key
    return found


def _rank(match: re.Match[str]) -> Rank:
    return int(match["mp"]), int(match["dp"] or 0)


def _check_complete(files: TagFiles, where: str) -> None:
    """Check that no rank lacks a file that it should have: one of model states, and one of the optimizer if any rank has one."""
    num_mp = 1 + max(mp for mp, _ in (*files.models, *files.optimizers))
    num_dp = 1 + max(dp for _, dp in (*files.models, *files.optimizers))
    divided = any(key.startswith("zero_pp_rank_") for key in files.models.values())  # ZeRO-3: each rank has a model file
    for kind, found, num in (("model", files.models, num_dp if divided else 1), ("optim", files.optimizers, num_dp)):
        missing = next(((mp, dp) for mp in range(num_mp) for dp in range(num) if (mp, dp) not in found), None)
        if missing is not None and found:
            raise CorruptError(
                f"{where}: has files of {num_mp} model-parallel × {num_dp} data-parallel ranks, but no {kind}_states.pt of "
                f"mp_rank {missing[0]:02d}, data-parallel rank {missing[1]}: copy it, or use another checkpoint"
            )


_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(?P<number>\d{1,6})(?P<rest>\..*)")


def is_expert(name: str) -> bool:
    """Tell whether a name is that of a parameter or buffer of a MoE expert."""
    return _EXPERT.fullmatch(name) is not None


def num_local_experts(names: Iterable[str]) -> dict[str, int]:
    """Count the experts of each layer on a rank, from the names of their parameters."""
    found: dict[str, int] = {}
    for name in names:
        if (expert := _EXPERT.fullmatch(name)) is not None:
            found[expert["layer"]] = max(found.get(expert["layer"], 0), int(expert["number"]) + 1)
    return found


def global_name(name: str, num_local: Mapping[str, int], expert_rank: int) -> str:
    """Convert the name of a parameter on one rank to its name in the whole model.

    >>> global_name("moe.deepspeed_moe.experts.deepspeed_experts.1.w", {"moe.deepspeed_moe.experts.deepspeed_experts.": 2}, 1)
    'moe.deepspeed_moe.experts.deepspeed_experts.3.w'
    """
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return name
    return f"{expert['layer']}{int(expert['number']) + expert_rank * num_local[expert['layer']]}{expert['rest']}"
