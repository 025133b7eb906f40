"""Reading the folder of a DeepSpeed checkpoint, or a universal one, as a checkpoint of this library: a catalog over its files.

1. Open the file of model states of each model-parallel rank: names, shapes, buffers, values (`torchfile.archive`).
2. For each data-parallel rank, find the runs of parameters in its optimizer's flat tensors (`places`), and add them as rows:
   master weights as ``model.<fqn>``, state as ``optimizer.state.<fqn>.<key>``. `values` adds other state, groups and values. A
   universal folder has files for each parameter instead (`universal`); without ZeRO, names are proved first (`without_zero`).
3. Take parameters without master weights from the module. Frozen parameters of ZeRO-3 lie in stripes beside it.
4. If several stages of a pipeline have a parameter, the first stage counts. Tensor-parallel shards are boxes of the
   whole tensor (`model_parallel`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from ...plugins import Catalog, CatalogBuilder, Format, Ints, Source, Storage
from ...plugins.errors import CorruptError, UnsupportedError
from ...plugins.torchfile import FileReader, FileTensor, PickledTensor, TorchFile
from .model_parallel import ModelParallelParts, TensorParallel
from .names import LATEST, MASTER, MODEL, NAME, OPTIMIZER, ROOT, TagFiles, latest_tag, parameter_name, tag_files
from .pipeline import TIED, open_layers, params_of_fragments, tied_names
from .places import (
    CURE_OF_FOLDERS,
    Params,
    advised,
    named_globally,
    open_state,
    placed_groups,
    shapes_in,
    shapes_of,
    striped_runs,
)
from .universal import add_universal
from .values import NOT_VALUES, OWN, GroupTensors, StateAdder, add_shard, add_whole, plain
from .without_zero import add_without_zero

_MODULE_FILE = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt")


def module_files(files: TagFiles, where: str, content: Mapping[str, Any]) -> list[str]:
    """List the files of experts that hold tensors of the module, under their names in the whole model.

    Raise `UnsupportedError` if the experts are divided in a way that cannot be read.

    Parameters
    ----------
    content
        The content of the first file of model states.
    """
    if not files.experts:
        return []
    how = "save with reshard_ckpt.integrations.deepspeed attached to the engine, or the module's state dict"
    if content.get("ds_autoep_layers"):
        raise UnsupportedError(
            f"{where}: has experts that AutoEP divides among ranks, which are not read; save the module's state dict"
        )
    if files.num_models > 1 or files.layers or files.universal is not None:
        raise UnsupportedError(
            f"{where}: has {files.experts[0]} beside model parallelism or universal files: experts are read of data-parallel "
            f"jobs; {how}"
        )
    return [key for key in files.experts if _MODULE_FILE.fullmatch(key)]


def refuse_other_order(config: Any, where: str) -> None:
    """Refuse experts whose ranks are not consecutive, as the config of the job tells."""
    if isinstance(config, Mapping) and config.get("use_data_before_expert_parallelism"):
        raise UnsupportedError(
            f"{where}: use_data_before_expert_parallelism numbers the ranks of experts otherwise, which is not read; save the "
            "module's state dict"
        )


def open_deepspeed(storage: Storage, key: str | None) -> Source | None:
    """Open the folder of a tag; return None if DeepSpeed did not write it; see `Format.open`."""
    files = None if key is not None else tag_files(storage)
    if files is None:
        return None
    return Source(storage, _Tag(storage, files).catalog(), NAME)


_NOTHING = object()


class _Tag:
    """Builds the catalog over the folder of one tag."""

    def __init__(self, storage: Storage, files: TagFiles) -> None:
        self._storage, self._files, self._reader = storage, files, FileReader(storage, tagged=OWN)
        self._where = storage.url
        self._builder = CatalogBuilder(NAME, storage.url)
        self._state = StateAdder(self._builder)
        self._models = [self._model(mp) for mp in range(files.num_models)]
        first = self._models[0].content
        self._buffers = {name for model in self._models for name in model.content.get("buffer_names") or ()}
        # With ZeRO-3, each rank has a file of model states; one rank alone tells the stage in its optimizer's file.
        optimizer, state = self._optimizer_state(0, 0) if files.optimizers else (self._models[0], {})
        self._is_striped = any(dp for _, dp in files.models) or plain(optimizer, state.get("zero_stage")) == 3
        self._num_dp = 1 + max(dp for _, dp in files.optimizers or files.models)
        self._layers = open_layers(self._reader, files.layers, storage.url)
        parallel = None
        if files.num_models > 1 and not files.layers:
            with advised(CURE_OF_FOLDERS):
                parallel = TensorParallel(self._info(self._models[0]))
        self._experts = module_files(files, self._where, first)
        self._parts = ModelParallelParts(self._builder, self._models, parallel)
        self._masters: set[str] = set()

    def _model(self, mp: int) -> TorchFile:
        file = self._reader.open(self._files.models[mp, 0])
        module = file.content.get("module", _NOTHING) if isinstance(file.content, dict) else _NOTHING
        if not isinstance(module, dict) and not (module is None and self._files.layers):
            raise CorruptError(f"{self._where}: {file.key} holds no model states of DeepSpeed; use another copy")
        self._builder.of_step(file.key, "global_steps", file.content.get("global_steps"))
        return file

    def _info(self, model: TorchFile) -> Mapping[str, Any]:
        info = model.content.get("universal_checkpoint_info")
        if not isinstance(info, dict):
            raise UnsupportedError(
                f"{self._where}: has files of {self._files.num_models} model-parallel ranks, and no universal_checkpoint_info "
                "that says how they divide the parameters; save with reshard_ckpt.integrations.deepspeed instead"
            )
        return plain(model, info)  # type: ignore[no-any-return]

    def _optimizer_state(self, mp: int, dp: int) -> tuple[TorchFile, Mapping[str, Any]]:
        file = self._reader.open(self._files.optimizers[mp, dp])
        state = file.content.get("optimizer_state_dict") if isinstance(file.content, dict) else None
        if not isinstance(state, dict):
            raise CorruptError(f"{self._where}: {file.key} holds no optimizer state of DeepSpeed; use another copy")
        return file, state

    def catalog(self) -> Catalog:
        # Master weights first: a tensor that has them is not added from the module, from experts or from layers.
        if self._files.universal is not None:
            add_universal(self._reader, self._files.universal, self._models, self._state)
        for mp, model in enumerate(self._models) if self._files.universal is None else ():
            if self._files.optimizers:
                self._add_zero(mp, model)
            elif isinstance(model.content.get("optimizer"), dict):
                state, module = model.content["optimizer"], self._candidates(model)
                add_without_zero(mp, model, state, module, self._parts, self._state, in_order=bool(self._layers))
        self._masters = set(self._builder.tensors)
        for mp, model in enumerate(self._models):
            self._add_module(mp, model)
        self._add_experts()
        self._add_layers()
        self._state.merged_groups()
        for key, value in self._models[0].content.items():
            if key not in NOT_VALUES and isinstance(key, str):
                self._state.tree(self._models[0], (ROOT, key), value)
        return self._builder.finish(links_from_names=False)

    def _add_zero(self, mp: int, model: TorchFile) -> None:
        """Add the optimizer state in the files of one model-parallel rank, of all its data-parallel ranks, to the catalog."""
        params = self._params(mp, model)
        known: dict[tuple[int, int], GroupTensors] = {}  # by number of the group, and `expert_rank`
        for dp in range(self._num_dp):
            file, state = self._optimizer_state(mp, dp)
            where = f"{self._where}: {file.key}"
            counts: Any = state.get("partition_count")  # one for each group, if groups differ
            has_places = self._experts and isinstance(counts, list | tuple)
            places = placed_groups(counts, self._num_dp, dp) if has_places else ()
            named = named_globally(params, places) if places else params
            with advised(CURE_OF_FOLDERS):
                opened = open_state(named, state, [place.rank for place in places] or dp, where)
            if max(opened.num_ranks, default=self._num_dp) != self._num_dp:
                raise CorruptError(
                    f"{where} is of {max(opened.num_ranks)} data-parallel ranks, and there are files of {self._num_dp}: one was "
                    "not copied, or those of several saves are mixed; copy it, or use another checkpoint"
                )
            for i, hyperparameters in enumerate(opened.param_groups):
                self._builder.of_step(file.key, f"step of param_groups[{i}]", hyperparameters.get("step"))
            for i, group in enumerate(opened.groups):
                self._builder.of_step(file.key, f"step of group {i}", file.number(group.values.get("step")))
                at = i, places[i].expert_rank if places else 0
                if is_first := at not in known:
                    known[at] = GroupTensors(self._builder, group.params, self._parts.shards(mp, group.params))
                for key, tensor in group.tensors.items():
                    known[at].add(file, key, tensor, group.runs)
                if is_first:
                    self._state.shared(file, group, known[at].shards)
            if dp == 0 or any(place.rank == 0 for place in places):
                self._state.groups(file, opened.param_groups)
            if dp == 0 and mp == 0:
                self._state.tree(file, (ROOT, OPTIMIZER), opened.values)
                if places:
                    refuse_other_order(plain(file, file.content.get("ds_config")), where)

    def _params(self, mp: int, model: TorchFile) -> list[Params]:
        """Return the parameters of each flat group, from one model-parallel rank's files.

        The names and shapes are in the model's file; for BF16_Optimizer of a pipeline without ZeRO, in the optimizer's files.
        """
        if model.content.get("param_shapes") is not None:
            return [Params.of(shapes) for shapes in shapes_in(model)]
        states = [self._optimizer_state(mp, dp)[1] for dp in range(self._num_dp)]
        return params_of_fragments([state.get("param_slice_mappings") for state in states], self._layers, model.key)

    def _candidates(self, model: TorchFile) -> list[FileTensor]:
        """List the tensors in files of model states that may be parameters. Tensors that no earlier stage has come first."""
        if self._layers:
            found = sorted(self._layers.values(), key=lambda tensor: self._parts.has_home(tensor.fqn))
        else:
            module = model.content["module"] or {}
            found = [FileTensor(fqn, view, model) for fqn, view in module.items() if isinstance(view, PickledTensor)]
        # Buffers are never parameters. A second name would count one parameter twice.
        skipped = {*self._buffers, *(() if self._layers else self._aliases(model, {tensor.fqn: tensor.view for tensor in found}))}
        return [tensor for tensor in found if tensor.fqn not in skipped]

    def _add_layers(self) -> None:
        """Add the tensors in the files of a pipeline's layers that have no master weights. A tied layer becomes an alias."""
        missing = next((name for name in sorted(self._buffers) if self._layers and name not in self._layers), None)
        if missing is not None and not missing.startswith(TIED):
            raise CorruptError(
                f"{self._where}: the buffer {missing} is in no file of a layer; copy "
                f"layer_{missing.partition('.')[0]:0>2}-model_states.pt, or use another checkpoint"
            )
        # Skip layers that have master weights. A layer of a tied module becomes an alias; any other is added whole.
        tied = tied_names(self._layers, self._builder, self._storage)
        for fqn, layer in self._layers.items():
            name = parameter_name(fqn)
            if name in self._masters:
                continue
            if fqn in tied:
                self._builder.alias(name, tied[fqn])
            else:
                add_whole(self._builder, layer.file, name, layer.view)

    def _add_experts(self) -> None:
        """Add tensors of experts, except those whose master weights were added.

        Without ZeRO, nothing names the optimizer state of experts, so the whole optimizer becomes unreadable.
        """
        for key in self._experts:
            file = self._reader.open(key)
            for fqn, view in file.content.items() if isinstance(file.content, dict) else ():
                if isinstance(view, PickledTensor) and parameter_name(fqn) not in self._masters:
                    add_whole(self._builder, file, parameter_name(fqn), view)
        if self._experts and not self._files.optimizers:
            self._state.refuse(f"{self._where}: {self._files.experts[0]}")

    def _add_module(self, mp: int, model: TorchFile) -> None:
        """Add the module's tensors that have no master weights (buffers, frozen parameters, or all), and its other values."""
        module = model.content["module"]
        if not isinstance(module, dict):
            return
        tensors = {fqn: view for fqn, view in module.items() if isinstance(view, PickledTensor)}
        aliases = self._aliases(model, tensors)
        frozen = shapes_of(model.content.get("frozen_param_shapes"), model.key) if self._is_striped else {}
        # Skip tensors that are there already: master weights, stripes of frozen parameters, and tensors known to be unreadable.
        for fqn, view in tensors.items():
            name = parameter_name(fqn)
            if fqn in aliases:
                self._builder.alias(name, parameter_name(aliases[fqn]))
            elif name not in self._masters and fqn not in frozen and not self._builder.is_unreadable(name):
                self._add_of_module(mp, model, fqn, view)
        for fqn, value in module.items() if mp == 0 else ():
            if not isinstance(value, PickledTensor):
                self._state.tree(model, (MODEL, fqn), value)
        self._add_frozen(mp, frozen)

    def _add_of_module(self, mp: int, model: TorchFile, fqn: str, view: PickledTensor) -> None:
        name, is_buffer = parameter_name(fqn), fqn in (model.content.get("buffer_names") or ())
        if self._is_striped and view.shape == (0,) and not is_buffer:
            error = CorruptError(
                f"{self._where}: {fqn} is divided among the ranks of ZeRO-3, and the files of its parts, optim_states.pt, are "
                "not here; copy them"
            )
            self._builder.unreadable(name, error)
        elif self._parts.parallel is not None and not is_buffer:
            shard = self._parts.tensor_parallel_shard(mp, fqn)
            if shard.readable:
                add_shard(self._builder, model, name, view, shard)
        elif self._parts.is_first_stage_of(mp, fqn):
            add_whole(self._builder, model, name, view)

    def _add_frozen(self, mp: int, frozen: Mapping[str, Ints]) -> None:
        """Add frozen parameters of ZeRO-3; each rank has a stripe of them."""
        if not frozen:
            return
        shards = zip(frozen.items(), self._parts.shards(mp, Params.of(frozen)), strict=True)
        alone = [GroupTensors(self._builder, Params.of({fqn: shape}), [shard]) for (fqn, shape), shard in shards]
        for dp in range(self._num_dp):
            file = self._reader.open(self._files.models[mp, dp])
            fragments = file.content.get("frozen_param_fragments") or {}
            for tensors in alone:
                runs, (fqn,) = striped_runs(tensors.params, self._num_dp, dp), tensors.params.names
                view = fragments.get(fqn)
                if not len(runs.param):
                    continue
                if not isinstance(view, PickledTensor) or prod(view.shape) < runs.end:
                    raise CorruptError(f"{self._where}: {file.key} lacks its part of the frozen {fqn}; use another copy")
                tensors.add(file, MASTER, view, runs)

    def _aliases(self, model: TorchFile, tensors: Mapping[str, PickledTensor]) -> dict[str, str]:
        """Map the second names of tied tensors to first names: pairs that rank 0 recorded, and tensors over the same memory."""
        masters = self._masters
        recorded = model.content.get("shared_params") or {}
        found = {name: of for name, of in recorded.items() if isinstance(of, str) and name in tensors}
        first: dict[PickledTensor, str] = {}
        for fqn, view in tensors.items():
            if prod(view.shape) and fqn not in found and (other := first.setdefault(view, fqn)) != fqn:
                # The optimizer has only one of the two names. If that is the later one, the earlier one is the second name.
                found[fqn] = other
                if parameter_name(fqn) in masters and parameter_name(other) not in masters:
                    del found[fqn]
                    found[other] = fqn
        return found


FORMAT = Format(
    NAME,
    "a folder of DeepSpeed, which has mp_rank_00_model_states.pt or such, or the file latest that names one",
    open_deepspeed,
    order=50,
    latest=latest_tag,
    root_marks=LATEST,
)
