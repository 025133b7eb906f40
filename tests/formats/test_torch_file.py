"""Files of ``torch.save`` are checkpoints: what torch reads of them is what this library reads, wherever it lies."""

from __future__ import annotations

import errno
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import CODES
from reshard_ckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptError,
    MismatchError,
    NameCollisionError,
    StorageError,
    UnsupportedError,
)
from reshard_ckpt.torchfile.zip_records import ZipRecords
from tests.checkpoint.test_convert import as_bytes
from tests.damage import Calls
from tests.layouts import shapes, values_of

SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert as_bytes(got) == as_bytes(wanted.resolve_conj().resolve_neg())


@st.composite
def views(draw: st.DrawFn, whole: torch.Tensor) -> torch.Tensor:
    """Some view of a tensor: reordered dims, parts of them, other steps, repeated elements."""
    view = whole
    if view.ndim:
        view = view.permute(draw(st.permutations(range(view.ndim))))
        dim = draw(st.integers(0, view.ndim - 1))
        begin, end = sorted((draw(st.integers(0, view.shape[dim])), draw(st.integers(0, view.shape[dim]))))
        view = view.narrow(dim, begin, end - begin)
        if draw(st.booleans()):
            view = view[:: draw(st.integers(1, 3))]
    if draw(st.integers(0, 5)) == 0:
        view = view.unsqueeze(0).expand(draw(st.integers(1, 3)), *view.shape)
    if view.is_complex() and draw(st.booleans()):
        view = view.conj()
    return view


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Nested dicts of tensors, several of which are views of one storage, and of values."""
    stores = [values_of(draw(shapes(7)), draw(st.sampled_from(CODES)), salt) for salt in range(draw(st.integers(1, 4)))]
    tensors = [draw(views(draw(st.sampled_from(stores)))) for _ in range(draw(st.integers(1, 6)))]
    values = [3, "a", 0.5, None, True, [1, 2], (1, "b"), torch.float16, {}]
    leaves: list[Any] = [*tensors, *draw(st.lists(st.sampled_from(values), max_size=3))]
    tree: dict[str, Any] = {"deep": {"er": {}}}
    for i, leaf in enumerate(leaves):
        where = draw(st.sampled_from([tree, tree["deep"], tree["deep"]["er"]]))
        where[f"k{i}"] = leaf
    return tree


def leaves(tree: Any, name: str = "") -> dict[str, Any]:
    if isinstance(tree, dict) and tree:
        return {
            n: leaf for key, child in tree.items() for n, leaf in leaves(child, f"{name}.{key}" if name else str(key)).items()
        }
    return {name: tree}


@given(trees())
@SAME_FOLDER
def test_what_torch_reads_is_what_is_read(tmp_path: Path, tree: dict[str, Any]):
    torch.save(tree, tmp_path / "x.pt")
    found, wanted = checkpoint.read(tmp_path / "x.pt"), leaves(torch.load(tmp_path / "x.pt", weights_only=True))
    assert set(found) == set(wanted)
    for name, leaf in wanted.items():
        if isinstance(leaf, torch.Tensor):
            assert_same(found[name], leaf)
        else:
            assert found[name] == leaf
            assert type(found[name]) is type(leaf)


@pytest.mark.parametrize("code", CODES)
def test_every_dtype_in_any_order(tmp_path: Path, code: str):
    whole = values_of((5, 6), code, 1)
    state = {"flat": whole, "turned": whole.T, "empty": whole[:0], "one": whole[3, 4], "column": whole[:, 2]}
    torch.save({"s": state}, tmp_path / "x.pt")
    for name, tensor in state.items():
        assert_same(checkpoint.read(tmp_path / "x.pt")[f"s.{name}"], tensor)


def test_slices_of_views_are_read_alone(tmp_path: Path):
    whole = torch.arange(3000.0).reshape(50, 60)
    torch.save({"turned": whole.T, "rows": whole[7:20]}, tmp_path / "x.pt")
    part = {"turned": checkpoint.read(tmp_path / "x.pt")["model.turned"]}
    assert torch.equal(part["turned"], whole.T)
    catalog = checkpoint.catalog(tmp_path / "x.pt")
    (rows,), (turned,) = (catalog.tensor(f"model.{name}").shards for name in ("rows", "turned"))
    assert rows.file.key == "x.pt"
    assert turned.num_bytes == 12000
    data = (tmp_path / "x.pt").read_bytes()
    assert data[rows.offset :][: rows.num_bytes] == as_bytes(whole[7:20])


def test_the_same_storage_is_one_tensor_with_two_names(tmp_path: Path):
    weight = torch.arange(6.0)
    torch.save({"a": weight, "b": weight, "c": weight.view(2, 3)}, tmp_path / "x.pt")
    catalog = checkpoint.catalog(tmp_path / "x.pt")
    assert catalog.tensor("model.b").alias_of == "model.a"
    assert catalog.tensor("model.c").shards[0].offset == catalog.tensor("model.a").shards[0].offset


def trained(named: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    parts = [[p for p in model.named_parameters() if p[0].startswith("0.") is first] for first in (True, False)]
    chosen: list[Any] = parts if named else [[p for _, p in part] for part in parts]
    optimizer = torch.optim.AdamW([{"params": chosen[0], "lr": 0.5}, {"params": chosen[1], "lr": 0.25}])
    for _ in range(3):
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_training_state_loads_by_name(tmp_path: Path):
    model, optimizer = trained(named=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "x.pt")
    fresh = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    other = torch.optim.AdamW(reversed(list(fresh.parameters())))  # another order, one group: names decide
    state: dict[str, Any] = {"model": fresh, "optimizer": other, "step": 0}
    with pytest.raises(MismatchError, match="lr differs"):
        checkpoint.load(tmp_path / "x.pt", state)
    params = list(fresh.parameters())
    state["optimizer"] = other = torch.optim.AdamW([{"params": params[2:][::-1]}, {"params": params[:2]}])
    checkpoint.load(tmp_path / "x.pt", state)
    assert state["step"] == 3
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.5]
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert all(torch.equal(other.state[mine][key], optimizer.state[theirs][key]) for key in ("exp_avg", "exp_avg_sq", "step"))


def test_an_optimizer_alone_stands_below_its_key(tmp_path: Path):
    _, optimizer = trained(named=True)
    torch.save(optimizer.state_dict(), tmp_path / "x.pt")
    assert "optimizer.state.0.weight.exp_avg" in checkpoint.catalog(tmp_path / "x.pt").names
    assert "optimizer.param_groups" in checkpoint.catalog(tmp_path / "x.pt").value_names


def test_state_belongs_to_its_parameter_wherever_both_lie(tmp_path: Path):
    """As Lightning and others nest them: the model's keys begin further up than the names that the optimizer knows."""
    model, optimizer = trained(named=True)
    weights = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}, tmp_path / "x.pt")
    link = checkpoint.catalog(tmp_path / "x.pt").links()["optimizer_states.0.state.0.weight.exp_avg"]
    assert (link.optimizer, link.fqn, link.parameter) == ("optimizer_states.0", "0.weight", "state_dict.net.0.weight")


def test_state_of_a_parameter_that_no_group_has_is_damage(tmp_path: Path):
    _, optimizer = trained(named=True)
    saved = optimizer.state_dict()
    saved["state"][99] = dict(saved["state"][0])
    torch.save({"optimizer": saved}, tmp_path / "x.pt")
    with pytest.raises(CorruptError, match="state for parameter 99, which is in none of its groups"):
        checkpoint.catalog(tmp_path / "x.pt")


def test_an_optimizer_without_names_says_what_to_do_when_it_is_wanted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model, optimizer = trained(named=False)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    with pytest.raises(MismatchError, match=r"optimizer was saved by number.*rename=\{f'optimizer") as refused:
        checkpoint.load(tmp_path / "x.pt", {"model": model, "optimizer": optimizer})
    assert str(refused.value).count("optimizer was saved by") == 1
    fresh = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    with caplog.at_level("INFO", "reshard_ckpt"):
        assert not checkpoint.load(tmp_path / "x.pt", {"model": fresh}).problems
    assert all(f"{tmp_path / 'x.pt'} " in line for line in caplog.messages)
    assert torch.equal(fresh[0].weight, model[0].weight)
    fresh[0] = torch.nn.Linear(6, 5, bias=False)
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "x.pt", {"model": fresh})
    assert "by number" not in str(caught.value)  # nobody asked for the optimizer


def test_a_folder_of_parts_is_one_model(tmp_path: Path):
    tensors = {name: torch.full((3,), float(i)) for i, name in enumerate("abc")}
    torch.save({"a": tensors["a"], "unnamed": torch.ones(1)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": tensors["b"], "c": tensors["c"]}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {name: f"pytorch_model-0000{1 if name == 'a' else 2}-of-00002.bin" for name in "abc"}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = checkpoint.read(tmp_path)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {f"model.{n}": t.tolist() for n, t in tensors.items()}
    index.write_text(json.dumps({"weight_map": {"z": "pytorch_model-00001-of-00002.bin"}}))
    with pytest.raises(CorruptError, match="has no tensor 'z'"):
        checkpoint.catalog(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    with pytest.raises(CorruptError, match="is not the key"):
        checkpoint.catalog(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "pytorch_model-00003-of-00003.bin"}}))
    with pytest.raises(CorruptError, match="is missing"):
        checkpoint.catalog(tmp_path)
    index.unlink()
    torch.save({"b": tensors["b"]}, tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(NameCollisionError, match="b is in"):
        checkpoint.catalog(tmp_path)
    (tmp_path / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(CorruptError, match="neither pytorch_model-00001-of-00002.bin nor an index"):
        checkpoint.catalog(tmp_path)


def test_other_files_beside_a_model_are_not_read_as_weights(tmp_path: Path):
    """As a Trainer leaves its arguments, and Accelerate an optimizer."""
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    torch.save(Path(), tmp_path / "training_args.bin")
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.bin")
    (tmp_path / "optimizer.bin").symlink_to("gone")
    assert checkpoint.read(tmp_path).keys() == {"model.w"}
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-00001-of-00001.bin")
    assert checkpoint.read(tmp_path).keys() == {"model.w"}
    (tmp_path / "training_args.bin").unlink()
    (tmp_path / "pytorch_model-00001-of-00001.bin").rename(tmp_path / "weights.bin")
    assert checkpoint.read(tmp_path).keys() == {"model.w", "model.last_epoch"}


@pytest.mark.parametrize("value", [torch.arange(3.0), [torch.arange(3.0)], 7])
def test_whatever_was_saved_has_a_name(tmp_path: Path, value: Any):
    torch.save(value, tmp_path / "x.pt")
    found = checkpoint.read(tmp_path / "x.pt")
    assert list(found) == ["model.0" if isinstance(value, list) else "model"]


def damaged(change: Callable[[bytes], bytes], path: Path) -> Path:
    torch.save({"w": torch.arange(50.0), "v": torch.arange(30), "n": 3}, path)
    path.write_bytes(change(path.read_bytes()))
    return path


def test_files_that_are_no_checkpoints_are_named(tmp_path: Path):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match="old format.*write it anew"):
        checkpoint.catalog(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "x")
    with pytest.raises(UnsupportedError, match="not one that torch.save wrote"):
        checkpoint.catalog(path)
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    with pytest.raises(UnsupportedError, match="TorchScript"):
        checkpoint.catalog(path)
    torch.save({"model": torch.nn.Linear(2, 2)}, path)
    with pytest.raises(UnsupportedError, match="torch.nn.modules.linear.Linear.*could run any code"):
        checkpoint.catalog(path)
    torch.save({"w": torch.ones(2)}, path, pickle_protocol=4)
    with pytest.raises(UnsupportedError, match="pickle_protocol=4, .*save it again without"):
        checkpoint.catalog(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointNotFound, match="a file of no format that is known") as caught:
        checkpoint.catalog(path)
    assert any("a file that torch.save wrote" in line for line in caught.value.looked_for)


def test_what_cannot_be_read_is_named_when_it_is_wanted_and_stops_nothing_else(tmp_path: Path):
    bad = {"sparse": torch.ones(2).to_sparse(), "complex": torch.ones(2, dtype=torch.complex128)}
    torch.save({"model": {"w": torch.ones(2)}, "bad": bad, "extra": {"step": 3}}, tmp_path / "x.pt")
    catalog = checkpoint.catalog(tmp_path / "x.pt")
    assert (catalog.names, catalog.value_names) == (("model.w",), ("extra.step",))
    assert set(catalog.unreadable) == {"bad.sparse", "bad.complex"}
    state = {"model": {"w": torch.zeros(2)}, "extra": {"step": 0}}
    checkpoint.load(tmp_path / "x.pt", state)
    assert (state["model"]["w"].tolist(), state["extra"]["step"]) == ([1, 1], 3)
    with pytest.raises(UnsupportedError, match="bad.sparse: layout torch.sparse_coo"):
        checkpoint.read(tmp_path / "x.pt", ["bad.sparse"])
    with pytest.raises(UnsupportedError, match=r"bad\.\w+: "):
        checkpoint.convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp")
    with pytest.raises(UnsupportedError, match="bad.complex: dtype torch.complex128"):
        checkpoint.convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp", select="bad.complex")
    report = checkpoint.convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp", exclude="bad")
    assert (report.num_tensors, report.num_values, set(report.left_out)) == (1, 1, {"bad.sparse", "bad.complex"})
    assert checkpoint.convert(tmp_path / "x.pt", tmp_path / "hf").num_tensors == 1


def test_code_in_a_file_never_runs(tmp_path: Path):
    torch.save({"w": torch.ones(2), "evil": Calls(Path.write_text, tmp_path / "written", "x")}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedError, match="could run any code"):
        checkpoint.read(tmp_path / "x.pt")
    assert not (tmp_path / "written").exists()


def rezipped(source: bytes, compression: int, edit: Callable[[str, bytes], bytes | None]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(source)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for member in old.infolist():
            data = edit(member.filename, old.read(member))
            if data is not None:
                new.writestr(member.filename, data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("compression", "edit", "match"),
    [
        (zipfile.ZIP_DEFLATED, lambda name, data: data, "is compressed"),
        (zipfile.ZIP_STORED, lambda name, data: b"big" if name.endswith("byteorder") else data, "another byte order"),
        (zipfile.ZIP_STORED, lambda name, data: data[:-8] if name.endswith("data/0") else data, "not its records|cannot load"),
        (
            zipfile.ZIP_STORED,
            lambda name, data: data + bytes(8) if name.endswith("data/1") else data,
            "not its records|cannot load",
        ),
        (zipfile.ZIP_STORED, lambda name, data: None if name.endswith("data/1") else data, "cannot load"),
    ],
    ids=["compressed", "byte order", "record too short", "record too long", "record lost"],
)
def test_archives_that_torch_would_not_write_are_named(tmp_path: Path, compression: int, edit: Any, match: str):
    with pytest.raises(CheckpointError, match=match):
        checkpoint.catalog(damaged(lambda good: rezipped(good, compression, edit), tmp_path / "x.pt"))


def test_records_at_any_alignment_are_found(tmp_path: Path):
    path = damaged(lambda good: rezipped(good, zipfile.ZIP_STORED, lambda name, data: data), tmp_path / "x.pt")
    found = checkpoint.read(path)
    assert torch.equal(found["model.w"], torch.arange(50.0))
    assert torch.equal(found["model.v"], torch.arange(30))


def test_storages_that_nothing_refers_to_do_not_mislead(tmp_path: Path):
    """More records than storages, all of one size and a page apart: the right ones are found, or it is an error."""

    def widen(good: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(out, "w") as new:
            for member in old.infolist():
                new.writestr(member.filename, old.read(member))
            for i in range(20):
                new.writestr(f"x/data/extra{i}", bytes(200))
        return out.getvalue()

    try:
        found = checkpoint.read(damaged(widen, tmp_path / "x.pt"))
    except CorruptError as error:
        assert "may be several of its records" in str(error)  # noqa: PT017
    else:
        assert torch.equal(found["model.w"], torch.arange(50.0))


def test_a_file_in_another_store_than_a_folder_is_read():
    from reshard_ckpt.storage import open_storage

    data = io.BytesIO()
    torch.save({"w": torch.arange(5)}, data)
    with open_storage("memory://torch") as storage:
        storage.publish("x.pt", data.getvalue())
        assert torch.equal(checkpoint.read("memory://torch/x.pt")["model.w"], torch.arange(5))
        storage.delete(["x.pt"])


@pytest.mark.parametrize("keys", [dict.fromkeys, set, list])
def test_numbers_that_collide_are_refused_before_torch_makes_keys_of_them(tmp_path: Path, keys: Callable[[Any], Any]) -> None:
    torch.save({"extra": keys(i * (2**61 - 1) for i in range(1, 1000))}, tmp_path / "hostile.pt")
    with pytest.raises(CorruptError, match="64 of its numbers have the same hash"):
        checkpoint.read(tmp_path / "hostile.pt")


def test_large_numbers_of_good_will_are_read(tmp_path: Path) -> None:
    extra = {"seen": {hash((i, "salt")) % 2**62: i for i in range(1000)}, "history": [2**63] * 1000}
    torch.save({"extra": extra}, tmp_path / "fine.pt")
    assert checkpoint.read(tmp_path / "fine.pt")["extra.history"] == [2**63] * 1000


def test_numbers_that_collide_are_refused_whatever_the_checksums_say(tmp_path: Path) -> None:
    """torch checks none, so that a file whose checksums are wrong is loaded like any other."""
    path, good = tmp_path / "hostile.pt", io.BytesIO()
    torch.save({"extra": dict.fromkeys(i * (2**61 - 1) for i in range(1, 1000))}, good)
    with zipfile.ZipFile(good) as archive:
        checksum = archive.getinfo("archive/data.pkl").CRC.to_bytes(4, "little")
    path.write_bytes(good.getvalue().replace(checksum, b"none"))
    assert len(torch.load(path, weights_only=True)["extra"]) == 999
    with pytest.raises(CorruptError, match="64 of its numbers have the same hash"):
        checkpoint.read(path)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(5000.0), "step": 3}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(checkpoint.read(tmp_path / "x.pt")["model.w"], torch.arange(5000.0))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.EMFILE, "Too many open files"), StorageError),
        (OSError(errno.EIO, "Input/output error"), StorageError),
        (MemoryError(), MemoryError),
    ],
)
def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path: Path, error: Exception, raised: type[Exception]):
    """A damaged newest step of a run is passed over, and an older one is loaded."""
    torch.save({"w": torch.arange(3.0)}, tmp_path / "w.pt")
    with mock.patch("torch.load", side_effect=error), pytest.raises(raised):
        checkpoint.read(tmp_path / "w.pt")


@pytest.mark.parametrize("while_opened", [True, False])
def test_a_disk_that_fails_once_does_not_make_a_file_damaged(while_opened: bool):
    saved = io.BytesIO()
    torch.save({"w": torch.arange(3.0)}, saved)

    class Failing(io.BytesIO):
        """A file whose next read fails."""

        fails = while_opened

        def read(self, size: int | None = -1) -> bytes:
            if self.fails:
                self.fails = False
                raise OSError(errno.EIO, "Input/output error")
            return super().read(size)

    file = Failing(saved.getvalue())
    if while_opened:
        with pytest.raises(OSError, match="Input/output error"):
            ZipRecords(file, "w.pt")
    records = ZipRecords(file, "w.pt")
    file.fails = True
    with pytest.raises(OSError, match="Input/output error"):
        records.read("data.pkl")


def test_a_damaged_file_is_called_so_also_while_another_error_is_handled():
    """As by a program that falls back to another file."""
    try:
        raise FileNotFoundError(errno.ENOENT, "the first choice")
    except FileNotFoundError:
        with pytest.raises(CorruptError, match="is not a whole zip"):
            ZipRecords(io.BytesIO(bytes(100)), "w.pt")
