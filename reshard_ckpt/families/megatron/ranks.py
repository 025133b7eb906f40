"""Reading Megatron's old folders, with one file for each model-parallel rank: ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``.

1. Open all files. Their ``args`` give the number of ranks, and so the stage and the experts of each file.
2. Number layers and experts, and join the shards of tensor-parallel ranks (`rank_tensors`). The names are those of Megatron's
   newer folders, so that everything that works on those works here.
3. Take values from the common state of the first file. Extra state and RNG states are objects with a part for each rank
   (`values`).
4. Take the distributed optimizer's state from ``distrib_optim.pt``: flat buffers, whose state `buckets` can name. The buffers of
   a rank hold the parameters in that rank's model file; if each virtual stage has a buffer, they hold that stage's. State of
   any other optimizer is keyed by position, and nothing says which parameter that is, so it is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ...plugins import Catalog, CatalogBuilder, Part, Storage
from ...plugins.errors import CorruptError, UnsupportedError
from ...plugins.torchfile import FileReader, PickledTensor, TorchFile, attributes_of
from .buckets import name_buckets
from .names import FULLY_RESHARDABLE, GROUPS, NAME, OPTIMIZER, SHARDING
from .rank_tensors import ModelChunk, RankTensors
from .values import add_common, add_part

_MAIN, _BUFFERS = "model_optim_rng.pt", "distrib_optim.pt"
_FILE = re.compile(rf"(mp_rank_\d{{2,9}}(?:_\d{{3,9}}){{0,2}})/{re.escape(_MAIN)}")
_MODEL = re.compile(r"model\d{0,4}")
MAX_RANKS = 1 << 16
Rank = tuple[int, int, int]
"""Numbers of a tensor-parallel, a pipeline and an expert-parallel rank."""


def is_per_rank(storage: Storage) -> bool:
    """Return whether a folder is of Megatron's kind with a file for each model-parallel rank; some may be missing."""
    return any(_FILE.fullmatch(key) for key, _ in storage.list())


def read_ranks(storage: Storage, *, named: bool = False) -> Catalog:
    """Build the catalog of a folder; `named` is the option of `megatron.open.open_megatron`.

    Raise `CorruptError` if a file is missing, cut or damaged, and `UnsupportedError` if the model was saved by a Megatron before
    megatron.core.
    """
    files = _Files(storage)
    builder = CatalogBuilder(NAME, files.where)
    for file in files.by_rank.values():
        builder.file(file.key, file.size)
        builder.of_step(file.key, "iteration", file.content.get("iteration"))
    model = RankTensors(files.storage, _chunks(files), files.args)
    model.add_tensors(builder)
    homes: dict[str, tuple[int, int | None]] = {}
    buffers: list[tuple[str, TorchFile, PickledTensor]] = []
    with builder.reading(f"{OPTIMIZER}.state"):
        buffers = list(_buffers(files, homes))
    for key, file, view in buffers:
        builder.tensor(key, view.dtype, view.shape)
        builder.view(key, file, view)
    named = named and bool(buffers)
    _add_values(builder, files, model, named=named)
    # Name the state in buffers by comparing their master weights with the weights, now that both have places in files.
    if named:

        def may_hold(prefix: str, part: Part) -> bool:
            file, stage = homes[prefix]
            return any(file == of and stage in (None, index) for of, index in model.homes[part.file, part.offset])

        name_buckets(builder, files.storage, may_hold)
    return builder.finish(links_from_names=False)


class _Files:
    """The opened model files of a folder by rank, and the ``args`` of the job that saved them."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.where = storage, storage.url
        self._reader = FileReader(storage, tagged="")
        found = sorted(match[1] for key, _ in storage.list() if (match := _FILE.fullmatch(key)))
        first = self.open(f"{found[0]}/{_MAIN}")
        args = first.content.get("args")
        self.args: Mapping[str, Any] = args if isinstance(args, dict) else attributes_of(args) or {}
        self.tp, self.pp, self.ep = (self._size(axis) for axis in ("tensor", "pipeline", "expert"))
        self._check(set(found))
        self.by_rank = {
            rank: first if self.folder(rank) == found[0] else self.open(f"{self.folder(rank)}/{_MAIN}") for rank in self._ranks()
        }

    def open(self, key: str, *, kinds: type | tuple[type, ...] = dict) -> TorchFile:
        """Open a file of the folder, and check that its content is of one of the types `kinds`."""
        file = self._reader.open(key)
        if not isinstance(file.content, kinds):
            raise CorruptError(f"{self.where}: {key} holds no state; use another checkpoint")
        return file

    def _ranks(self) -> Iterator[Rank]:
        return product(range(self.tp), range(self.pp), range(self.ep))

    def folder(self, rank: Rank) -> str:
        """Return the name of the folder that holds a rank's files, such as ``mp_rank_00_001``."""
        stage = f"_{rank[1]:03d}" if self.pp > 1 else ""
        return f"mp_rank_{rank[0]:02d}{stage}" + (f"_{rank[2]:03d}" if self.ep > 1 else "")

    def _size(self, axis: str) -> int:
        size = self.args.get(f"{axis}_model_parallel_size")
        if size is None and axis == "expert":
            return 1
        if type(size) is not int or not 0 < size <= MAX_RANKS:
            raise CorruptError(
                f"{self.where}: its args say {axis}_model_parallel_size={size!r:.40}, so that nothing tells which ranks its "
                "files are of; use another checkpoint"
            )
        return size

    def _check(self, found: set[str]) -> None:
        """Check that the folder has a folder for each model-parallel rank, and none for any other rank."""
        say = f"{self.where}: its args say TP {self.tp}, PP {self.pp} and EP {self.ep}"
        # One folder after the other: a list of all would take too much memory if hostile args claim very many ranks.
        lacking = next((folder for folder in map(self.folder, self._ranks()) if folder not in found), None)
        if lacking is not None:
            raise CorruptError(f"{say}, but {lacking} is not there; copy all of them, or use another checkpoint")
        if len(found) > self.tp * self.pp * self.ep:
            odd = min(found - set(map(self.folder, self._ranks())))
            raise CorruptError(f"{say}, but {odd} is there; move what is of another save away")
        experts = self.args.get("expert_tensor_parallel_size")
        if self.ep > 1 and experts not in (None, self.tp):
            raise UnsupportedError(
                f"{say}, and that experts are cut over {experts!r:.20} ranks instead: its files lack some of them; load it with "
                "Megatron, and save it with --ckpt-format torch_dist"
            )


def _chunks(files: _Files) -> list[tuple[ModelChunk, Mapping[str, Any]]]:
    """List the chunks of the model in all files, each with its state dict."""
    found: list[tuple[ModelChunk, Mapping[str, Any]]] = []
    for number, ((tp, pp, ep), file) in enumerate(files.by_rank.items()):
        keys = [key for key in file.content if isinstance(key, str) and _MODEL.fullmatch(key)]
        # The keys are "model", or "model0", "model1", … with virtual stages.
        for i, key in enumerate(sorted(keys, key=lambda key: int(key.removeprefix("model") or 0))):
            state = file.content[key]
            if not isinstance(state, dict) or any(isinstance(value, dict) for value in state.values()):
                raise UnsupportedError(
                    f"{files.where}: {file.key} has a model of Megatron before its core, or none; load it with Megatron, and "
                    "save it with --use-mcore-models"
                )
            found.append((ModelChunk(tp, pp, ep, i, file, number), {str(name): value for name, value in state.items()}))
    if not found:
        raise CorruptError(f"{files.where}: its files hold no model; use another checkpoint")
    return found


def _add_values(builder: CatalogBuilder, files: _Files, model: RankTensors, *, named: bool) -> None:
    for name, place, counts, held in model.objects():
        add_part(builder, name, place, counts, held.chunk.file, held.value)
    for (tp, pp, ep), file in files.by_rank.items():
        if "rng_state" in file.content:
            place, shape = ((pp, tp), (files.pp, files.tp)) if files.ep == 1 else ((pp, tp, ep), (files.pp, files.tp, files.ep))
            add_part(builder, "rng_state", place, shape, file, file.content["rng_state"])
    # The common state is the same in all files, so the first one's is taken.
    first = next(iter(files.by_rank.values()))
    common = {key: value for key, value in first.content.items() if key != "rng_state" and not _MODEL.fullmatch(str(key))}
    optimizer = common.get(OPTIMIZER)
    if isinstance(optimizer, list):
        common[OPTIMIZER] = optimizer = dict(enumerate(optimizer))
    if _is_positional(optimizer):
        error = UnsupportedError(
            f"{files.where}: the state of its optimizer is kept by position, and nothing in it says of which parameter; the "
            "model can be read. To have the optimizer, load it with Megatron, and save it with --ckpt-format torch_dist"
        )
        for name in ("state", GROUPS):
            builder.unreadable(f"{OPTIMIZER}.{name}", error)
        del common[OPTIMIZER]
    elif named and isinstance(optimizer, dict):
        common[OPTIMIZER] = _marked_reshardable(optimizer)
    add_common(builder, common, first)


def _marked_reshardable(optimizer: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's common state (or that of each member of a chain), marked as saved in whole tensors."""
    if any(isinstance(key, int) for key in optimizer):
        return {key: _marked_reshardable(part) if isinstance(part, dict) else part for key, part in optimizer.items()}
    return {**optimizer, SHARDING: FULLY_RESHARDABLE}


def _is_positional(optimizer: Any) -> bool:
    """Return whether an optimizer's state dict keys state by the parameter's position; a distributed optimizer's does not."""
    if not isinstance(optimizer, dict):
        return False
    inner = [part for key, part in optimizer.items() if isinstance(key, int) or key == OPTIMIZER]
    return "fp32_from_fp16_params" in optimizer or bool(optimizer.get("state")) or any(map(_is_positional, inner))


def _buffers(files: _Files, homes: dict[str, tuple[int, int | None]]) -> Iterator[tuple[str, TorchFile, PickledTensor]]:
    """Yield the flat buffers of distributed optimizers: the key, the file and the tensor of each.

    `homes` receives the owner of each buffer, by prefix of its names: the number of a model's file, and the virtual stage if the
    buffer belongs to one.
    """
    if any(_LAYER_WISE.fullmatch(key) for key, _ in files.storage.list()):
        raise UnsupportedError(
            f"{files.where}: its optimizer is in files of each data-parallel rank (layer_wise_optimizer_0.pt), which are not "
            "read; load it with Megatron, and save it with --ckpt-format torch_dist"
        )
    for number, (rank, model) in enumerate(files.by_rank.items()):
        folder = files.folder(rank)
        num_stages = sum(1 for key in model.content if isinstance(key, str) and _MODEL.fullmatch(key))
        if files.storage.size(f"{folder}/{_BUFFERS}") is None:
            continue
        file = files.open(f"{folder}/{_BUFFERS}", kinds=(dict, list))
        # A chain of optimizers is a list. Its buffers get the number of their optimizer in front of their keys.
        chain = file.content if isinstance(file.content, list) else [file.content]
        for i, state in enumerate(chain):
            prefix = f"chained_{i}." if len(chain) > 1 else ""
            of_stage = _is_of_stages(state, num_stages)
            for path, view in _flat(state, ()):
                key = f"{prefix}optimizer.distributed.{folder}.gbuf_idx_{'.'.join(path)}"
                homes[key.rpartition(".")[0]] = number, int(path[0]) if of_stage and path[0].isdecimal() else None
                file.at(view)  # raises if the file is cut
                yield key, file, view


def _is_of_stages(state: Any, num_stages: int) -> bool:
    """Return whether a distributed optimizer saved one buffer for each virtual stage, and not one for the whole rank.

    That is so if there are as many buffers as virtual stages, and all have the same one dtype.
    """
    buffers = {key: kinds for key, kinds in state.items() if type(key) is int} if isinstance(state, dict) else {}
    kinds = [list(kinds) for kinds in buffers.values() if isinstance(kinds, dict)]
    return sorted(buffers) == list(range(num_stages)) and len(kinds) == num_stages and all(kind == kinds[0] for kind in kinds)


def _flat(state: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], PickledTensor]]:
    """Yield each flat tensor in a distributed optimizer's state, with its path: number of the buffer, dtypes, key."""
    if isinstance(state, PickledTensor) and len(path) == 3 and len(state.shape) == 1:
        yield path, state
    elif isinstance(state, dict) and len(path) < 3:
        for i, (key, value) in enumerate(state.items()):
            yield from _flat(value, (*path, str(i) if isinstance(key, tuple) else str(key)))
    elif isinstance(state, PickledTensor | list):
        raise UnsupportedError("its optimizer's buffers are of an older kind; load it with Megatron, and save it again")


_LAYER_WISE = re.compile(r"mp_rank_\d+(_\d+){0,2}/layer_wise_optimizer_\d+\.pt")
