"""Names, claims and extra state of modules, and loading in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import Replication
from reshard_ckpt.core.trees import map_tree
from reshard_ckpt.errors import LayoutError, MismatchError, NameCollisionError, UnsupportedError, UsageError
from reshard_ckpt.format.values import encode_value
from reshard_ckpt.state import capture
from tests.helpers import load, position_values, save


def names(state: Any) -> list[str]:
    return [entry.spec.name for entry in capture(state).tensors]


class Stateful(nn.Linear):
    """A layer with extra state."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Halved(nn.Module):
    """Keeps its weight in half precision, and hands out a float32 copy: what state_dict gives is not its own memory."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value, dtype=torch.float16))
        self.register_state_dict_post_hook(
            lambda module, state, prefix, meta: state.update({f"{prefix}weight": module.weight.float()})
        )


def test_compiled_and_checkpointed_modules_keep_the_names_of_the_plain_one():
    plain = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    wrapped = torch.compile(nn.Sequential(checkpoint_wrapper(nn.Sequential(torch.compile(nn.Linear(2, 2)))), nn.Linear(2, 2)))
    assert names({"model": wrapped}) == names({"model": plain})
    saved = save([capture({"model": plain})])
    load(saved, {"model": wrapped}, wanted=set())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True))


@pytest.mark.parametrize("wrap", [lambda norm: norm, checkpoint_wrapper, torch.compile])
def test_buffers_under_fsdp_are_each_ranks_own(wrap):
    norm = nn.BatchNorm1d(2)
    norm.__class__ = type("FSDPNorm", (FSDPModule, nn.BatchNorm1d), {})  # as `fully_shard` does
    found = capture({"model": nn.Sequential(wrap(norm), nn.BatchNorm1d(2))}).tensors
    own = [entry.spec.name for entry in found if entry.spec.replication is Replication.BUFFER]
    assert own == [f"model.0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]


def test_a_users_submodule_called_module_stays():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2, bias=False)

    assert names({"model": Net()}) == ["model.module.weight"]


def test_data_parallel_is_a_wrapper():
    assert names({"model": nn.DataParallel(nn.Linear(2, 2, bias=False))}) == ["model.weight"]


def test_a_key_that_no_module_explains_is_kept():
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    model._register_state_dict_hook(lambda module, state, *_: state.update({"0.custom.key.with.dots": torch.zeros(2)}))
    assert names({"model": model}) == ["model.0.weight", "model.0.custom.key.with.dots"]


def test_tied_weights_are_one_memory_under_two_names():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    first, second = (e.spec for e in capture({"model": model}).tensors)
    assert (first.alias_of, second.alias_of) == (None, "model.a.weight")

    with torch.no_grad():
        model["a"].weight.copy_(position_values((3, 3)))
    saved = save([capture({"model": model})])
    untied = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    load(saved, {"model": untied}, wanted=set())
    assert torch.equal(untied["a"].weight, untied["b"].weight)


def test_views_that_share_storage_without_being_equal_are_no_aliases():
    buffer = torch.arange(6.0)
    entries = capture({"x": {"all": buffer, "head": buffer[:3], "grid": buffer.view(2, 3), "again": buffer.view(6)}}).tensors
    assert {e.spec.name: e.spec.alias_of for e in entries} == {"x.all": None, "x.head": None, "x.grid": None, "x.again": "x.all"}


def test_empty_tensors_are_no_aliases():
    entries = capture({"a": torch.zeros(0), "b": torch.zeros(0), "c": torch.zeros(())}).tensors
    assert [(e.spec.alias_of, len(e.spec.pieces)) for e in entries] == [(None, 0), (None, 0), (None, 1)]


def test_extra_state_goes_back_to_the_module_that_gave_it_whatever_its_shape():
    model = nn.Sequential(Stateful({"scale": torch.arange(4.0), "steps": 3}), Stateful(None))
    saved = save([capture({"model": model})])
    assert saved.values["model.0._extra_state"]["steps"] == 3
    layers = Stateful(torch.zeros(9)), Stateful("old")
    parameter = layers[0].weight
    load(saved, {"model": nn.Sequential(checkpoint_wrapper(layers[0]), layers[1])}, wanted=set())
    assert torch.equal(layers[0].extra["scale"], torch.arange(4.0))
    assert layers[1].extra is None
    assert layers[0].weight is parameter


def test_missing_and_unexpected_extra_state_are_named():
    with_extra, without = nn.Sequential(Stateful(1)), nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(MismatchError, match=r"model.0._extra_state: missing value"):
        load(save([capture({"model": without})]), {"model": with_extra})
    with pytest.raises(MismatchError, match=r"model.0._extra_state: saved as a value, for which the module has no place"):
        load(save([capture({"model": with_extra})]), {"model": without})


EXTRA = {
    "dict": {"a": 1, "b": {"c": 2}},
    "tensors": {"scale": torch.arange(3.0), "n": 1},
    "tensor": torch.arange(4.0),
    "list": [torch.arange(2), 3],
    "bytes": b"12",
}


@pytest.mark.parametrize("kind", EXTRA)
def test_extra_state_of_a_module_and_of_its_state_dict_load_into_each_other(tmp_path: Path, kind: str):
    def model(scale: int) -> nn.Sequential:
        extra = map_tree(lambda _, node: node * scale if isinstance(node, torch.Tensor | int) else node, EXTRA[kind])
        layers = nn.Sequential(checkpoint_wrapper(Stateful(extra)))
        nn.init.constant_(layers[0].weight, scale)
        return layers

    expected = encode_value(EXTRA[kind], "")
    checkpoint.save(tmp_path / "module", {"model": model(1)})
    checkpoint.save(tmp_path / "dict", {"model": model(1).state_dict()})
    for folder in ("module", "dict"):
        target, found = model(0), model(0).state_dict()
        checkpoint.load(tmp_path / folder, {"model": target})
        assert encode_value(target[0].extra, "") == expected
        checkpoint.load(tmp_path / folder, {"model": found})
        assert encode_value(found["0._extra_state"], "") == expected
        assert target[0].weight.tolist() == found["0.weight"].tolist() == [[1.0] * 2] * 2


def test_all_modules_of_a_list_take_extra_state_of_one_name(tmp_path: Path):
    class Stage(Stateful):
        def __init__(self, name: str) -> None:
            super().__init__({"n": 0, "scale": torch.zeros(3)})
            self.register_parameter(name, self._parameters.pop("weight"))
            self.register_parameter("bias", None)

    extra = {"n": 7, "scale": torch.arange(3.0)}
    stages = [Stage("first"), Stage("second")]
    saved = {"first": torch.ones(2, 2), "second": torch.ones(2, 2), "_extra_state": extra}
    checkpoint.save(tmp_path, {"model": saved})
    checkpoint.load(tmp_path, {"model": stages})
    for stage in stages:
        assert encode_value(stage.extra, "") == encode_value(extra, "")


@pytest.mark.parametrize("ignore", [[], ["model._extra_state*"]], ids=["loaded", "ignored"])
def test_extra_state_that_a_module_takes_into_its_own_dict_is_not_lost(tmp_path: Path, ignore: list[str]):
    class Refilled(Stateful):
        def set_extra_state(self, state: dict[str, int]) -> None:
            self.extra.clear()
            self.extra.update(state)

    checkpoint.save(tmp_path, {"model": Stateful({"n": 7}).state_dict()})
    target = Refilled({"n": 0})
    checkpoint.load(tmp_path, {"model": target}, ignore=ignore)
    assert target.extra == {"n": 0 if ignore else 7}


def test_a_module_gets_keys_of_saved_extra_state_that_it_lacks(tmp_path: Path):
    checkpoint.save(tmp_path, {"model": nn.Sequential(Stateful({"a": 1, "b": {"c": 2}})).state_dict()})
    target = nn.Sequential(Stateful({"a": 0}))
    checkpoint.load(tmp_path, {"model": target})
    assert target[0].extra == {"a": 1, "b": {"c": 2}}


def test_a_strict_load_names_extra_state_of_a_module_that_the_state_lacks(tmp_path: Path):
    class Counter(nn.Module):
        """A module without tensors."""

        def get_extra_state(self) -> int:
            return 7

        def set_extra_state(self, state: int) -> None: ...

    checkpoint.save(tmp_path, {"model": nn.ModuleDict({"layer": nn.Linear(2, 2), "counter": Counter()})})
    lacking = nn.ModuleDict({"layer": nn.Linear(2, 2)})
    for into in (lacking, lacking.state_dict()):
        with pytest.raises(MismatchError, match=r"model.counter._extra_state: in the checkpoint, but every rank passes"):
            checkpoint.load(tmp_path, {"model": into})
        assert not checkpoint.load(tmp_path, {"model": into}, ignore=["model.counter._extra_state"]).values
        assert checkpoint.load(tmp_path, {"model": into}, strict=False).values


def test_a_tensor_whose_name_ends_like_extra_state_is_a_tensor(tmp_path: Path):
    def model(value: float) -> nn.Module:
        net = nn.Linear(2, 2)
        net.register_buffer("my_extra_state", torch.full((3,), value))
        return net

    checkpoint.save(tmp_path, {"model": model(5.0)})
    assert "model.my_extra_state" in checkpoint.catalog(tmp_path).names
    target = model(0.0)
    checkpoint.load(tmp_path, {"model": target})
    assert target.my_extra_state.tolist() == [5.0] * 3


def test_a_key_of_a_dict_that_ends_like_extra_state_is_a_plain_key(tmp_path: Path):
    checkpoint.save(tmp_path, {"notes": {"my_extra_state": 5}})
    for into in ({"a": 1, "b": torch.zeros(2)}, torch.zeros(2)):
        with pytest.raises(MismatchError, match=r"notes\.my_extra_state"):
            checkpoint.load(tmp_path, {"notes": {"my_extra_state": into}})


@pytest.mark.parametrize("nothing", [None, {}])
def test_extra_state_that_one_rank_saved_as_nothing_loads_from_the_other_ranks(nothing: dict[str, Any] | None):
    extra = {"n": 7, "scale": torch.arange(1.0, 4.0)}
    saved = save([capture({"model": {"_extra_state": each}}) for each in (nothing, extra)])
    target = {"_extra_state": {"n": 0, "scale": torch.zeros(3)}}
    load(saved, {"model": target})
    assert encode_value(target["_extra_state"], "") == encode_value(extra, "")


@pytest.mark.parametrize(("size", "held"), [(1, None), (1, {}), (1, {"a": 0}), (2, {}), (2, {"a": 0})])
def test_extra_state_of_a_module_without_tensors_loads_into_the_entry_of_a_state_dict(size: int, held: dict[str, int] | None):
    saved = save([capture({"model": {"counter._extra_state": {"a": 1, "b": 2}}})])
    target = {"counter._extra_state": held}
    load(saved, {"model": target}, rank=0, size=size)
    assert target == {"counter._extra_state": {"a": 1, "b": 2}}


def test_tensors_that_a_hook_made_are_given_back_through_load_state_dict():
    saved = save([capture({"model": nn.Sequential(Halved(3.0))})])
    assert saved.tensors["model.0.weight"].dtype == torch.float32
    target = nn.Sequential(Halved(0.0))
    load(saved, {"model": target}, wanted=set())
    assert target[0].weight.tolist() == [3.0] * 3


def test_a_module_with_a_load_state_dict_of_its_own_is_given_the_loaded_state():
    class Cached(nn.Linear):
        doubled: torch.Tensor

        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            result = super().load_state_dict(state, strict, assign)
            self.doubled = 2 * self.weight.detach()
            return result

    source, target = Cached(2, 3), Cached(2, 3)
    weight = target.weight
    load(save([capture({"model": source})]), {"model": target}, wanted=set())
    assert target.weight is weight
    assert torch.equal(target.doubled, 2 * source.weight)


def test_hooks_that_run_after_load_state_dict_see_the_loaded_weights():
    source, target, seen = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 3)), []
    weight = target[0].weight
    target[0].register_load_state_dict_post_hook(lambda module, keys: seen.append((module.weight.clone(), *keys)))
    load(save([capture({"model": source})]), {"model": target}, wanted=set())
    assert target[0].weight is weight
    assert [(w.tolist(), missing, unexpected) for w, missing, unexpected in seen] == [(source[0].weight.tolist(), [], [])]


def test_a_hook_that_refuses_is_a_named_error():
    class Picky(Halved):
        def _load_from_state_dict(self, *args: Any) -> None:
            raise ValueError("not today")

    with pytest.raises(MismatchError, match="model: the module's load_state_dict refused the loaded state: not today"):
        load(save([capture({"model": Halved(1.0)})]), {"model": Picky(0.0)})


def test_non_persistent_buffers_are_left_out():
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    assert names({"m": model}) == ["m.weight", "m.bias"]


def test_stages_of_one_rank_with_one_name_for_different_tensors_are_refused():
    with pytest.raises(
        LayoutError, match=r"model.0.weight: two stages on this rank have different tensors of this name.*Sequential"
    ):
        capture({"model": [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(3, 3))]})


def test_stages_of_one_rank_that_hold_one_tensor_both_hand_it_over():
    model = nn.Linear(2, 2, bias=False)
    assert names({"model": [model, model]}) == ["model.weight"], "the same memory need be saved once"
    assert names({"model": [model, nn.Linear(2, 2, bias=False)]}) == ["model.weight"] * 2


def test_a_module_and_a_dict_that_give_one_name_collide():
    with pytest.raises(NameCollisionError, match=r"model.a.weight"):
        capture({"model": nn.ModuleDict({"a": nn.Linear(2, 2)}), "model.a": {"weight": torch.zeros(1)}})


def test_modules_deep_in_a_dict_take_the_names_of_their_path():
    assert names({"nets": {"actor": nn.Linear(1, 1, bias=False), 3: [nn.Linear(1, 1, bias=False)]}}) == [
        "nets.actor.weight",
        "nets.3.weight",
    ]


def test_fsdp1_of_another_release_of_torch_is_refused_with_what_to_save_instead():
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # without the fields that its constructor sets
    nn.Module.__init__(wrapped)
    wrapped._modules["_fsdp_wrapped_module"] = nn.Linear(2, 2)
    with pytest.raises(
        UnsupportedError, match=r"model: torch .* flat parameters of FSDP1 .*_handle.*get_state_dict.*fully_shard"
    ):
        capture({"model": nn.ModuleDict({"inner": wrapped})})


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def freed(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.empty(2, device="meta"), r"x: is on the meta device .*to_empty"),
        (torch.zeros(2, dtype=torch.complex128), r"x: dtype torch.complex128 cannot be stored; .*view_as_real"),
        (torch.zeros((1,) * 33), r"x: has 33 dims, and a checkpoint holds tensors of up to 32; .*flatten"),
        (torch.eye(2).to_sparse(), r"x: layout torch.sparse_coo cannot be stored"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"x: quantized tensors cannot be stored; save int_repr"),
        (Wrapper(torch.zeros(2)), r"x: Wrapper keeps its data in other tensors"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"x: is a nested tensor, .*unbind"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), r"x: is a nested tensor, .*unbind"),
        (FakeTensorMode().from_tensor(torch.ones(2)), r"x: is a FakeTensor, which has a shape and no data"),
        (freed(torch.ones(2), 0), r"x: its memory was freed"),
        (freed(torch.ones(2, 3), 23), r"x: its memory was freed"),
        (freed(torch.ones(4, 3).T[1:, ::2], 35), r"x: its memory was freed"),  # its last element is the 9th of 12
        (torch._to_functional_tensor(torch.ones(2)), r"x: its memory was freed"),  # as in torch.func.functionalize
    ],
)
def test_tensors_without_plain_memory_are_refused_with_what_to_do(tensor, message):
    saved, _ = save([capture({"x": torch.ones(2)})]), capture({"x": torch.ones(2, 3)})  # they look like some of the tensors
    capture({"x": freed(torch.ones(4)[4:], 0), "y": torch.zeros(3, 0)})  # without elements, they need no memory
    with pytest.raises(UnsupportedError, match=message):
        capture({"x": tensor})
    with pytest.raises(UnsupportedError, match=message):
        load(saved, {"x": tensor})


def test_a_conjugated_view_is_saved_by_value_and_not_loaded_into():
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    saved = save([capture({"x": value.conj()})])
    assert saved.tensors["x"].tolist() == [1 - 2j, 3 + 4j]
    with pytest.raises(UnsupportedError, match="x: is a lazily conjugated view"):
        load(saved, {"x": value.conj()})


def test_an_expanded_view_is_saved_and_not_loaded_into():
    expanded = torch.arange(3.0).expand(2, 3)
    saved = save([capture({"x": expanded})])
    assert torch.equal(saved.tensors["x"], expanded)
    # Strides that interleave put no two elements in one place; (2, 1) does.
    woven = torch.zeros(8).as_strided((1, 2, 3), (0, 3, 2))
    load(save([capture({"x": torch.arange(6.0).reshape(1, 2, 3)})]), {"x": woven})
    assert woven.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UnsupportedError, match=r"x: strides \(2, 1\) of shape \(2, 3\) put several elements in one place"):
        load(saved, {"x": torch.zeros(5).as_strided((2, 3), (2, 1))})
    with pytest.raises(UnsupportedError, match=r"x: strides \(0, 1\) of shape \(2, 3\) put several elements in one place"):
        load(saved, {"x": expanded})


@pytest.mark.parametrize(
    "make", [lambda t: t.T, lambda t: t[:, ::2], lambda t: t[1:2], lambda t: t.permute(1, 0), lambda t: t[2]]
)
def test_any_strides_are_saved_and_loaded_in_place(make):
    source, target = position_values((4, 6)), torch.zeros(4, 6)
    view = make(target)
    load(save([capture({"x": make(source)})]), {"x": view}, wanted=set())
    assert torch.equal(view, make(source))
    assert int((target != 0).sum()) == view.numel()


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.bool, torch.uint16, torch.complex64]
)
def test_every_kind_of_element_comes_back_bit_by_bit(dtype):
    source = (torch.arange(12) % 5).to(torch.float32).to(dtype)
    target = torch.zeros(12, dtype=dtype)
    load(save([capture({"x": source})]), {"x": target}, wanted=set())
    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))


def test_extra_state_of_another_stage_is_for_that_stage_to_judge():
    whole = nn.ModuleDict({"0": Stateful(1), "1": Stateful(2)})
    saved = save([capture({"model": whole})])
    stage = nn.ModuleDict({"1": Stateful(0)})
    load(saved, {"model": stage}, rank=1, size=2)
    assert stage["1"].extra == 2


def test_a_lazy_module_is_refused_before_its_first_forward():
    with pytest.raises(UnsupportedError, match=r"model.weight: has no shape yet"):
        capture({"model": nn.LazyLinear(3)})


class Rotary(nn.Module):
    """A layer with a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)


def test_a_module_without_memory_is_refused_with_the_lines_that_give_it_some():
    plain = Rotary()
    saved = save([capture({"model": plain, "optimizer": torch.optim.AdamW(plain.parameters())})])
    with torch.device("meta"):
        model = Rotary()
    early = torch.optim.AdamW(model.parameters())
    with pytest.raises(UnsupportedError) as caught:
        load(saved, {"model": model, "optimizer": early})
    text = str(caught.value)
    assert text.startswith(
        "model: 7 of 7 tensors are on the meta device and have no data (proj.weight, proj.bias, norm.weight and 4 more)"
    )
    assert "set the buffers again that no checkpoint holds (frequencies)" in text
    line = next(line.strip() for line in text.splitlines() if "to_empty(" in line).replace("cuda", "cpu")
    exec(line, {"model": model})
    with pytest.raises(UsageError, match=r"on the meta device.*to_empty\(\) has replaced it; make the optimizer after that"):
        load(saved, {"model": model, "optimizer": early})
    load(saved, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, wanted=set())
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))
