"""A state that is described from what was kept of it is described as it would be for the first time, whatever has changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.errors import UnsupportedError
from reshard_ckpt.state import kept
from reshard_ckpt.state.capture import Captured, capture
from tests.launch import on_ranks

State = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def training_state() -> State:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.second(model.first(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ema = {"w": torch.ones(3, 2), "deep": [torch.zeros(2), {"x": torch.zeros(())}]}
    return {"optimizer": optimizer, "model": model, "scheduler": scheduler, "ema": ema, "extra": {"step": 1, "name": "a"}}


def shown(captured: Captured) -> Any:
    places = [(spec, m.tolist(), m.shape, m.stride(), m.dtype, m.requires_grad) for spec, m in captured.tensors]
    return places, captured.values, captured.mesh, captured.warnings, captured.unused


def is_known(state: State, **options: Any) -> bool:
    """Whether the description of a state is found."""
    found: list[int] = []
    keep_values = kept.Description.keep_values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept.Description, "keep_values", lambda known, trees: found.append(1) or keep_values(known, trees))
        capture(state, **options)
    return bool(found)


def check(state: State, **options: Any) -> None:
    """Describe a state twice with what is kept, and once without."""
    found = [shown(capture(state, **options)) for _ in range(2)]
    kept.KNOWN.forget()
    assert found == [shown(capture(state, **options))] * 2


def weights_of(state: State) -> list[nn.Parameter]:
    return list(state["model"].parameters())


def swap_memory(state: State) -> None:
    weights_of(state)[0].data = torch.full((4, 4), 7.0)


def transpose(state: State) -> None:
    for holder in (weights_of(state)[0], *state["optimizer"].state[weights_of(state)[0]].values()):
        holder.data = holder.data.t().contiguous().t() if holder.ndim else holder.data


def tie(state: State) -> None:
    state["model"].first.weight = state["model"].second[0].weight
    state["optimizer"].param_groups[0]["params"] = weights_of(state)


def share_memory(state: State) -> None:
    state["ema"]["w"] = state["ema"]["more"] = torch.ones(3, 2)


def share_an_address(state: State) -> None:
    state["ema"]["deep"][0].set_(state["ema"]["w"].untyped_storage(), 0, (2,), (1,))


def share_all_memory(state: State) -> None:
    weight = state["ema"]["w"]
    state["ema"]["twin"] = torch.zeros_like(weight)
    check(state)
    state["ema"]["twin"].set_(weight)


def part_shared_memory(state: State) -> None:
    state["ema"]["twin"] = state["ema"]["w"].view_as(state["ema"]["w"])
    check(state)
    state["ema"]["twin"] = state["ema"]["w"] + 1


def change_dtype(state: State) -> None:
    state["ema"]["w"] = state["ema"]["w"].double()


def change_shape(state: State) -> None:
    state["ema"]["w"].resize_(2, 2)


def give_an_attribute(state: State) -> None:
    state["ema"]["w"].note = "mine"


def conjugate(state: State) -> None:
    state["ema"]["w"] = torch.ones(3, dtype=torch.complex64).conj().imag


def rename(state: State) -> None:
    state["model"].other = state["model"].first
    del state["model"].first


def rename_a_key(state: State) -> None:
    state["ema"] = {"v": state["ema"]["w"], "deep": state["ema"]["deep"]}


def key_of_another_type(state: State) -> None:
    state["ema"][1] = torch.zeros(5)
    check(state)
    state["ema"][True] = state["ema"].pop(1)


def add_a_buffer(state: State) -> None:
    state["model"].second.register_buffer("count", torch.zeros(3))


def add_a_hook(state: State) -> None:
    state["model"].register_state_dict_post_hook(lambda module, raw, *_: raw.update(hooked=torch.ones(2)))


def add_extra_state(state: State) -> None:
    state["model"].register_state_dict_post_hook(lambda module, raw, *_: raw.update(note="text"))


class WithExtra(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(2)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


def add_a_tensor_as_extra_state(state: State) -> None:
    state["model"].last = WithExtra(2, 2)


def change_hyperparameters(state: State) -> None:
    state["optimizer"].param_groups[0]["lr"] = 0.5
    state["scheduler"].step()
    state["extra"]["step"] = 2


def split_groups(state: State) -> None:
    group = state["optimizer"].param_groups[0]
    last = group["params"].pop()
    state["optimizer"].add_param_group({"params": [last], "lr": 3.0})


def reorder_parameters(state: State) -> None:
    state["optimizer"].param_groups[0]["params"].reverse()


def freeze(state: State) -> None:
    weights_of(state)[1].requires_grad_(False)


def drop_state(state: State) -> None:
    del state["optimizer"].state[weights_of(state)[1]]


def swap_state(state: State) -> None:
    states = state["optimizer"].state
    one, other = weights_of(state)[0], weights_of(state)[2]
    states[one], states[other] = states[other], states[one]


def rename_state(state: State) -> None:
    entry = state["optimizer"].state[weights_of(state)[0]]
    entry["max_exp_avg_sq"] = entry.pop("exp_avg_sq")


def put_a_value_in_state(state: State) -> None:
    state["optimizer"].state[weights_of(state)[0]]["step"] = 3


def replace_the_optimizer(state: State) -> None:
    state["optimizer"] = torch.optim.SGD(weights_of(state), lr=0.1)


def wrap(state: State) -> None:
    state["model"] = torch.optim.swa_utils.AveragedModel(state["model"])
    del state["optimizer"]


def declare(state: State) -> None:
    state["ema"]["w"] = LocalShard(state["ema"]["w"], (6, 2), (3, 0))


def new_value(state: State) -> None:
    state["extra"]["more"] = [1, 2]


CHANGES: list[Callable[[State], None]] = [
    swap_memory, transpose, tie, share_memory, share_an_address, share_all_memory, part_shared_memory, change_dtype, change_shape,
    give_an_attribute, conjugate, rename,
    rename_a_key, key_of_another_type, add_a_buffer, add_a_hook, add_extra_state, add_a_tensor_as_extra_state,
    change_hyperparameters, split_groups,
    reorder_parameters, freeze, drop_state, swap_state, rename_state, put_a_value_in_state, replace_the_optimizer, wrap, declare,
    new_value,
]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"exclude": ["optimizer.state.*.exp_avg", "nothing"]}], ids=["all", "some"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_state_that_changed_is_described_as_it_is_now(change: Callable[[State], None], options: dict[str, Any]) -> None:
    state = training_state()
    check(state, **options)
    capture(state, **options)
    change(state)
    check(state, **options)


def test_the_description_of_an_unchanged_state_is_found_in_the_next_steps() -> None:
    state = training_state()
    kept.KNOWN.forget()
    assert not is_known(state)
    for change in (change_hyperparameters, swap_memory):
        change(state)
        assert is_known(state)
    state["extra"]["rng"] = torch.get_rng_state()
    assert not is_known(state)
    state["extra"]["rng"] = torch.get_rng_state()  # another tensor, in other memory
    assert is_known(state)


def test_what_is_kept_holds_no_part_of_the_state() -> None:
    state = training_state()
    kept.KNOWN.forget()
    capture(state)
    assert is_known(state)
    model = state["model"]
    living = [weakref.ref(thing) for thing in (model, state["optimizer"], *model.parameters(), state["ema"]["w"])]
    del state, model
    gc.collect()
    assert not [ref() for ref in living if ref() is not None]


@pytest.mark.parametrize("others", [{}, {"empty": torch.zeros(0)}], ids=["alone", "beside an empty one"])
def test_a_tensor_without_memory_is_refused_although_the_facts_are_those_of_an_earlier_save(others: dict[str, Any]) -> None:
    capture({"x": torch.arange(5.0), **others})
    with pytest.raises(UnsupportedError, match="x: its memory was freed"):
        capture({"x": torch._to_functional_tensor(torch.arange(5.0)), **others})


def test_states_of_the_same_facts_are_saved_with_their_own_bytes(tmp_path: Any) -> None:
    for value in (1.0, 2.0):
        checkpoint.save(tmp_path, {"t": {"w": torch.full((3,), value)}})
        assert checkpoint.read(tmp_path)["t.w"].tolist() == [value] * 3


@on_ranks(2)
def test_a_state_of_several_ranks_that_changed_is_described_as_it_is_now() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    state = {"t": {"a": DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]), "b": torch.ones(2)}}
    check(state)
    capture(state)
    state["t"]["a"] = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(1)])
    check(state)
    capture(state)
    state["t"]["a"] = DTensor.from_local(torch.ones(2, 4), mesh, [Replicate()])
    check(state)

    sharded = training_state()
    for part in ("optimizer", "scheduler"):
        del sharded[part]
    capture(sharded)
    fully_shard(sharded["model"])
    sharded["optimizer"] = torch.optim.AdamW(sharded["model"].parameters())
    check(sharded)
    capture(sharded)
    assert is_known(sharded)
    assert capture(sharded, mesh={"pp": 2}).mesh != capture(sharded).mesh
    check(sharded, mesh={"pp": 2})

    replicated = training_state()
    capture(replicated)
    inner = replicated["model"]
    replicated["model"] = DistributedDataParallel(inner)
    check(replicated)
    capture(replicated)
    assert is_known(replicated)
    replicated["model"] = inner
    check(replicated)
