"""What a load promises: the right bytes or a named error, and nothing changed before everything fits."""

from __future__ import annotations

import random
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.engine.common import files
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, CorruptError, MismatchError, NameCollisionError, UsageError
from reshard_ckpt.storage.local import LocalStorage
from reshard_ckpt.storage.protocol import Hints
from tests.engine.loading.test_read_once import flip_half
from tests.launch import on_ranks


def files_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def save_some(path: Path) -> dict[str, torch.Tensor]:
    state = {f"w{i}": torch.arange(50_000, dtype=torch.float32) * (i + 1) for i in range(4)}
    checkpoint.save(path, {"t": state, "extra": {"step": 3, "long": list(range(3000)), "rng": checkpoint.PerRank(b"seed")}})
    return state


def test_all_problems_come_in_one_message_and_nothing_changes(tmp_path: Path) -> None:
    checkpoint.save(
        tmp_path, {"t": {"same": torch.ones(3), "shape": torch.ones(2, 3), "dtype": torch.ones(3), "more": torch.ones(1)}}
    )
    into = {
        "same": torch.zeros(3),
        "shape": torch.zeros(3, 3),
        "dtype": torch.zeros(3, dtype=torch.float64),
        "lost": torch.zeros(1),
    }
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path, {"t": into})
    text = str(caught.value)
    assert "t.lost: not in the checkpoint" in text
    assert "t.more: in the checkpoint, but not in the state passed" in text
    assert "t.shape: saved with global shape (2, 3), wanted (3, 3)" in text
    assert "t.dtype: saved as F32, wanted F64" in text
    for word in ("strict=False", "cast=", "allow_resize="):
        assert word in text
    assert len(caught.value.problems) == 4
    assert all(not tensor.any() for tensor in into.values())


def test_strict_false_loads_what_fits_and_reports_the_rest(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"t": {"same": torch.ones(3), "shape": torch.ones(2, 3), "more": torch.ones(1)}})
    into = {"same": torch.zeros(3), "shape": torch.zeros(3, 3), "lost": torch.zeros(1)}
    report = checkpoint.load(tmp_path, {"t": into}, strict=False)
    assert into["same"].all()
    assert not into["shape"].any()
    assert [line.split(":")[0] for line in report.problems] == ["t.lost", "t.more", "t.shape"]
    assert (report.num_tensors, report.num_bytes) == (1, 12)


def test_a_part_of_the_keys_may_be_loaded_alone(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": {"x": torch.ones(3)}, "b": {"y": torch.ones(2)}})
    into = torch.zeros(2)
    checkpoint.load(tmp_path, {"b": {"y": into}})
    assert into.all()


def test_cast_converts_only_what_it_names(tmp_path: Path) -> None:
    source = torch.linspace(-3, 3, 50)
    checkpoint.save(tmp_path, {"t": {"a": source, "b": source}})
    into = {"a": torch.zeros(50, dtype=torch.bfloat16), "b": torch.zeros(50, dtype=torch.bfloat16)}
    with pytest.raises(MismatchError, match=r"t\.b: saved as F32, wanted BF16"):
        checkpoint.load(tmp_path, {"t": into}, cast=["*.a"])
    checkpoint.load(tmp_path, {"t": into}, cast=True)
    assert torch.equal(into["a"], source.bfloat16())


def test_allow_resize_loads_the_overlap_and_keeps_the_rest(tmp_path: Path) -> None:
    source = torch.arange(30.0).reshape(6, 5)
    checkpoint.save(tmp_path, {"emb": source})
    for rows in (8, 4, 6):
        into = torch.full((rows, 5), -1.0)
        checkpoint.load(tmp_path, {"emb": into}, allow_resize=["emb"])
        assert torch.equal(into[: min(rows, 6)], source[: min(rows, 6)])
        assert (into[6:] == -1).all()
    with pytest.raises(MismatchError, match="emb"):
        checkpoint.load(tmp_path, {"emb": torch.zeros(8, 5, 1)}, allow_resize=["emb"])


def test_rename_maps_saved_names_to_wanted_ones(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"old": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    model["old"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
    target = torch.nn.ModuleDict({"new": torch.nn.Linear(2, 2)})
    other = torch.optim.SGD(target.parameters(), lr=1.0, momentum=0.5)
    names = {"model.old": "model.new", "optimizer.state.old": "optimizer.state.new"}
    checkpoint.load(tmp_path, {"model": target, "optimizer": other}, rename=names)
    assert torch.equal(target["new"].weight, model["old"].weight)
    assert other.param_groups[0]["lr"] == 0.25
    with pytest.raises(NameCollisionError, match="the same name"):
        checkpoint.load(tmp_path, {"model": target}, rename=lambda name: "model.new.weight" if name.startswith("model") else name)


def test_tied_weights_are_stored_once_and_load_into_untied_ones_and_back(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    checkpoint.save(tmp_path / "tied", {"a": weight, "b": weight})
    catalog = checkpoint.catalog(tmp_path / "tied")
    assert catalog.tensor("b").alias_of == "a"
    assert sum(s.num_bytes for f in "ab" for s in catalog.tensor(f).shards if catalog.tensor(f).alias_of is None) == 48
    one, two = torch.zeros(3, 4), torch.zeros(3, 4)
    checkpoint.load(tmp_path / "tied", {"a": one, "b": two})
    assert torch.equal(one, weight)
    assert torch.equal(two, weight)
    checkpoint.save(tmp_path / "untied", {"a": one, "b": two})
    shared = torch.zeros(3, 4)
    with patch.object(LocalStorage, "hints", Hints(read_bytes=16)):
        checkpoint.load(tmp_path / "untied", {"a": shared, "b": shared})
    assert torch.equal(shared, weight)
    two[2, 3] += 1
    checkpoint.save(tmp_path / "unequal", {"a": one, "b": two})
    shared.zero_()
    with pytest.raises(MismatchError, match="b: tied to a in the state passed, but the checkpoint holds different values"):
        checkpoint.load(tmp_path / "unequal", {"a": shared, "b": shared})
    assert not shared.any()


@pytest.mark.parametrize("tied", [False, True])
def test_an_empty_name_is_one_like_others(tmp_path: Path, tied: bool) -> None:
    first = torch.arange(3.0)
    checkpoint.save(tmp_path, {"": first, "a": first if tied else torch.ones(3), "b": torch.full((3,), 5.0)})
    into = {"a": torch.zeros(3), "": torch.zeros(3), "b": torch.zeros(3)}
    if tied:
        into["a"] = into[""]
    assert checkpoint.load(tmp_path, into).num_tensors == 3 - tied
    assert [t.tolist() for t in into.values()] == [first.tolist() if tied else [1.0] * 3, first.tolist(), [5.0] * 3]


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    save_some(tmp_path)
    into = {f"w{i}": torch.zeros(50_000) for i in range(4)}
    generator = random.Random(7)
    paths = [path for path in files_of(tmp_path) if path.name != "timeline.msgpack"]  # which is no part of the checkpoint
    for _ in range(60):
        path = generator.choice(paths)
        good = path.read_bytes()
        at = generator.randrange(len(good))
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << generator.randrange(8))]) + good[at + 1 :])
        extra = {"step": 0, "long": [], "rng": checkpoint.PerRank(None)}
        with pytest.raises(CheckpointError):
            checkpoint.load(tmp_path, {"t": into, "extra": extra})
        path.write_bytes(good)


def test_a_damaged_block_names_its_place_and_what_was_overwritten(tmp_path: Path) -> None:
    save_some(tmp_path)
    (file,) = tmp_path.glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    into = {f"w{i}": torch.zeros(50_000) for i in range(4)}
    with pytest.raises(CorruptError, match=r"is damaged in bytes \d+:\d+, which hold t\.w\d") as caught:
        checkpoint.load(tmp_path, {"t": into})
    changed = {name for name, tensor in into.items() if tensor.any()}
    assert all(f"t.{name}" in str(caught.value) for name in changed)
    for tensor in into.values():
        tensor.zero_()
    with pytest.raises(CorruptError, match="no tensor was changed"):
        checkpoint.load(tmp_path, {"t": into}, verify_first=True)
    assert not any(tensor.any() for tensor in into.values())
    checkpoint.load(tmp_path, {"t": into}, verify=False)


@on_ranks(2)
def test_no_rank_changes_a_tensor_before_every_rank_has_verified(tmp_path: Path) -> None:
    rank = dist.get_rank()

    def row(values: torch.Tensor) -> dict[str, LocalShard]:
        return {"w": LocalShard(values, (2, 50_000), (rank, 0))}

    checkpoint.save(tmp_path, row(torch.arange(50_000.0)[None] + 50_000 * rank))
    flip_half(tmp_path, "w")  # the row of rank 0
    for verifies in (True, rank == 0):
        into = torch.zeros(1, 50_000)
        with pytest.raises(CorruptError, match="no tensor was changed"):
            checkpoint.load(tmp_path, row(into), verify_first=verifies)
        assert not into.any()
    with pytest.raises(CorruptError, match=r"(no tensor was changed|already overwritten, wholly or in part) on this rank"):
        checkpoint.load(tmp_path, row(torch.zeros(1, 50_000)))


def test_missing_and_truncated_files_are_named_before_anything_changes(tmp_path: Path) -> None:
    save_some(tmp_path)
    (file,) = tmp_path.glob("*/*.safetensors")
    data = file.read_bytes()
    into = {f"w{i}": torch.zeros(50_000) for i in range(4)}
    for verify in (True, False):
        file.write_bytes(data[:-1])
        with pytest.raises(CorruptError, match=r"safetensors has \d+ bytes, the catalog says"):
            checkpoint.load(tmp_path, {"t": into}, verify=verify)
        file.unlink()
        with pytest.raises(CorruptError, match="is missing"):
            checkpoint.load(tmp_path, {"t": into}, verify=verify)
    assert not any(tensor.any() for tensor in into.values())


def test_a_file_of_another_save_is_found(tmp_path: Path) -> None:
    save_some(tmp_path / "one")
    checkpoint.save(tmp_path / "two", {"t": {f"w{i}": torch.zeros(50_000) for i in range(4)}, "extra": {"step": 4}})
    (one,), (two,) = ((tmp_path / n).glob("*/*.safetensors") for n in ("one", "two"))
    data = two.read_bytes()
    one.write_bytes(
        data + bytes(one.stat().st_size - len(data)) if len(data) < one.stat().st_size else data[: one.stat().st_size]
    )
    with pytest.raises(CorruptError, match="is damaged in bytes"):
        checkpoint.load(tmp_path / "one", {"t": {f"w{i}": torch.zeros(50_000) for i in range(4)}})


def test_a_slice_reads_little_more_than_itself(tmp_path: Path) -> None:
    big = torch.arange(16 << 20, dtype=torch.float32).reshape(4096, 4096)
    checkpoint.save(tmp_path, {"w": big})
    into = torch.zeros(256, 4096)
    report = checkpoint.load(tmp_path, {"w": LocalShard(into, (4096, 4096), (1000, 0))})
    assert torch.equal(into, big[1000:1256])
    assert report.num_bytes == into.numel() * 4
    assert report.bytes_read <= report.num_bytes * 1.07
    exact = checkpoint.load(tmp_path, {"w": LocalShard(into, (4096, 4096), (1000, 0))}, verify=False)
    assert exact.bytes_read == exact.num_bytes


def test_columns_load_into_memory_of_any_strides(tmp_path: Path) -> None:
    big = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    checkpoint.save(tmp_path, {"w": big})
    for into in (torch.zeros(1024, 100), torch.zeros(100, 1024).T, torch.zeros(2048, 300)[::2, 50:250:2]):
        checkpoint.load(tmp_path, {"w": LocalShard(into, (1024, 1024), (0, 517))})
        assert torch.equal(into, big[:, 517:617])


def test_one_thread_or_many_read_the_same(tmp_path: Path) -> None:
    big = torch.arange(10 << 20, dtype=torch.int32)
    checkpoint.save(tmp_path, {"w": big})
    for threads in (1, 7):
        into = torch.zeros_like(big)
        with patch.object(files, "MAX_THREADS", threads):
            checkpoint.load(tmp_path, {"w": into})
        assert torch.equal(into, big)


def test_a_backward_pass_does_not_use_what_was_loaded_meanwhile(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": torch.zeros(1000)})
    w = torch.nn.Parameter(torch.arange(1000.0))
    loss = (w * w).sum()
    checkpoint.load(tmp_path, {"w": w}, verify_first=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert w.grad is None


def test_read_takes_names_prefixes_and_says_what_is_missing(tmp_path: Path) -> None:
    state = save_some(tmp_path)
    assert list(checkpoint.read(tmp_path, ["t"])) == [f"t.w{i}" for i in range(4)]
    got = checkpoint.read(tmp_path, ["t.w2", "extra.step", "extra.rng"])
    assert torch.equal(got["t.w2"], state["w2"])
    assert (got["extra.step"], got["extra.rng"]) == (3, [b"seed"])
    with pytest.raises(MismatchError, match=r"t\.w9: not in the checkpoint"):
        checkpoint.read(tmp_path, ["t.w9"])
    with pytest.raises(UsageError, match=r"names=\['t'\]"):
        checkpoint.read(tmp_path, "t")


def test_a_scheme_that_no_store_serves_is_an_error() -> None:
    with pytest.raises(UsageError, match="hdfs"):
        checkpoint.save("hdfs://host/ckpt", {"a": torch.ones(1)})


def test_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    checkpoint.save(tmp_path, {"model": model, "optimizer": adam})
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with pytest.raises(MismatchError, match="saved by another kind of optimizer, with betas") as raised:
        checkpoint.load(tmp_path, {"model": model, "optimizer": sgd})
    assert "allow_missing" not in str(raised.value)  # the state would be empty, and the hyperparameters still those of AdamW
    assert not sgd.state
    assert sgd.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("stepped", ["saved", "loading"])
def test_ignored_optimizer_state_keeps_its_value_and_the_rest_loads(stepped: str, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for name in ("saved", "loading")}
    for param in model.parameters():
        optimizers[stepped].state[param] = {"momentum_buffer": torch.full_like(param, 3.0)}
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizers["saved"]})
    state = {"model": model, "optimizer": optimizers["loading"]}
    with pytest.raises(MismatchError, match=r"more: not in the checkpoint") as raised:
        checkpoint.load(tmp_path, {**state, "more": torch.zeros(1)}, ignore=["optimizer.state.b"])
    assert "fits no name" not in str(raised.value)
    checkpoint.load(tmp_path, state, ignore=["optimizer.state.b"])
    # Of the two names of the tied weight, one is ignored: it loads by the other, and it is not taken out.
    kept = [model["a"].bias, model["b"].bias][stepped == "loading"]
    assert optimizers["loading"].state.keys() == {model["a"].weight, kept}
    assert all(entry["momentum_buffer"].eq(3).all() for entry in optimizers["loading"].state.values())


def test_a_fresh_optimizers_state_is_in_the_same_order_on_every_rank(tmp_path: Path) -> None:
    keys = [f"s{i}" for i in range(10)]
    param = torch.nn.Parameter(torch.ones(2))
    module = torch.nn.ParameterDict({"p": param})
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param] = {key: torch.ones(2) for key in reversed(keys)}
    checkpoint.save(tmp_path, {"model": module, "optimizer": optimizer})
    fresh = torch.optim.SGD([param], lr=0.1)
    checkpoint.load(tmp_path, {"model": module, "optimizer": fresh})
    assert list(fresh.state[param]) == keys


@pytest.mark.parametrize("option", ["strict", "verify", "verify_first", "read_once"])
def test_an_option_that_is_neither_true_nor_false_is_refused(option: str, tmp_path: Path):
    checkpoint.save(tmp_path, {"w": torch.ones(3)})
    for value in ("no", 0, None):
        with pytest.raises(UsageError, match=rf"^{option}={value!r}: pass True or False"):
            checkpoint.load(tmp_path, {"w": torch.zeros(3)}, **{option: value})


@pytest.mark.parametrize("option", ["cast", "allow_resize", "allow_missing", "ignore"])
def test_patterns_that_are_no_list_of_text_are_refused(option: str, tmp_path: Path):
    checkpoint.save(tmp_path, {"w": torch.ones(3)})
    for value in (3, None, [1], {"w": "bfloat16"}):
        with pytest.raises(UsageError, match=rf"^{option}={re.escape(repr(value))}: pass a list of patterns"):
            checkpoint.load(tmp_path, {"w": torch.zeros(3)}, **{option: value})
    with pytest.raises(UsageError, match="rename='model': pass a dict"):
        checkpoint.load(tmp_path, {"w": torch.zeros(3)}, rename="model")  # type: ignore[arg-type]


def test_a_mismatch_offers_what_says_most_first_and_strict_false_last(tmp_path: Path):
    checkpoint.save(tmp_path, {"model": {"w": torch.ones(3), "old": torch.ones(2)}})
    with pytest.raises(MismatchError) as said:
        checkpoint.load(tmp_path, {"model": {"w": torch.ones(3).half(), "b": torch.ones(1)}, "net": torch.ones(1)})
    text = str(said.value)
    offered = ["under 'net'", "rename=", "allow_missing=", "ignore=", "cast=", "or with strict=False"]
    assert [text.index(word) for word in offered] == sorted(text.index(word) for word in offered)


def test_bytes_that_nothing_verifies_are_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tensors = {"w": torch.ones(300), "b": torch.ones(10)}
    checkpoint.save(tmp_path / "own", {"model": tensors})
    checkpoint.convert(tmp_path / "own", tmp_path / "foreign", to="safetensors")
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
    with caplog.at_level("WARNING", "reshard_ckpt"):
        assert checkpoint.load(tmp_path / "own", into).bytes_unverified == 0
        assert checkpoint.load(tmp_path / "own", into, verify=False).bytes_unverified == 1240
        assert not caplog.messages
        assert checkpoint.load(tmp_path / "foreign", into).bytes_unverified == 1240
    (line,) = caplog.messages
    assert re.search(r"1\.24 kB of .*foreign were loaded unverified, as safetensors has no checksums", line), line


def test_a_folder_of_checkpoints_lists_them(tmp_path: Path):
    for name in ("best", "last", "deep/er"):
        checkpoint.save(tmp_path / name, {"w": torch.ones(3)})
    (tmp_path / "newest").symlink_to("gone")  # a broken link beside them is not what the path lacks
    with pytest.raises(CheckpointNotFound, match=r"it holds the checkpoints best, deep/er, last; pass one of them$"):
        checkpoint.load(tmp_path, {"w": torch.zeros(3)})
