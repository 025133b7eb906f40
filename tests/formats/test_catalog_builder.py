"""A catalog over foreign files: parts of any kind are read as the elements that they say, and contradictions are named."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.engine.loading.stream import stream, whole_run
from reshard_ckpt.errors import CheckpointError, CorruptError, NameCollisionError, UnsupportedError
from reshard_ckpt.formats.catalog_builder import CatalogBuilder
from reshard_ckpt.formats.parts import parts_of_box
from reshard_ckpt.storage import open_storage
from reshard_ckpt.torchfile.archive import FileReader


def elements(builder: CatalogBuilder, files: dict[str, bytes], name: str) -> torch.Tensor:
    """Read a tensor of a catalog over files in memory."""
    with open_storage("memory://builder") as storage:
        for key, data in files.items():
            storage.publish(key, data)
        catalog = builder.finish()
        index = catalog.index(name)
        data = b"".join(bytes(part) for part in stream(storage, catalog, [whole_run(catalog, index)]))
        return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(catalog.shape(index))


@given(st.permutations(range(3)), st.lists(st.integers(1, 3), min_size=3, max_size=3), st.integers(0, 2))
def test_a_box_of_any_strides_is_read_in_order(order: list[int], sizes: list[int], low: int) -> None:
    stored = torch.arange(float(np.prod(sizes))).reshape(sizes)
    box = stored.permute(order)
    shape = (box.shape[0] + low, *box.shape[1:])
    builder = CatalogBuilder("test", "here")
    file = builder.file("data", stored.numel() * 4 + low * 4 * box[0].numel())
    builder.tensor("w", torch.float32, shape, parts_of_box((low, 0, 0), tuple(box.shape), box.stride(), file, 0, 4, "w"))
    builder.piece("w", file=file, offset=stored.numel() * 4, offsets=(0, 0, 0), lengths=(low, *box.shape[1:]))
    first = torch.full((low, *box.shape[1:]), -1.0)
    data = stored.numpy().tobytes() + first.numpy().tobytes()
    assert torch.equal(elements(builder, {"data": data}, "w"), torch.cat([first, box]))


@given(st.lists(st.integers(1, 11), unique=True, max_size=4))
def test_rows_and_pieces_of_one_tensor_are_read_alike(cuts: list[int]) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    builder = CatalogBuilder("test", "here")
    file, number = builder.file("data", 48), builder.tensor("w", "F32", (3, 4))
    box = builder.box((0, 0), (3, 4))
    for i, (low, high) in enumerate(pairwise([0, *sorted(cuts), 12])):
        if i % 2:
            builder.piece("w", file=file, offset=4 * low, start=low, count=high - low)
        else:
            builder.rows(number, box, low, high - low, file, 4 * low)
    assert sum(part.num_elements for part in builder.parts("w")) == 12
    assert torch.equal(elements(builder, {"data": whole.numpy().tobytes()}, "w"), whole)


def test_a_second_tensor_of_a_name_is_refused_unless_it_is_the_same() -> None:
    builder = CatalogBuilder("test", "here")
    builder.tensor("w", "F32", (2,))
    assert builder.tensor("w", torch.float32, (2,), again=True) == builder.tensors["w"].number
    with pytest.raises(NameCollisionError, match="here: w occurs twice"):
        builder.tensor("w", "F32", (2,))
    with pytest.raises(CorruptError, match=r"w is F32 of shape \(2,\) in one file and BF16 of shape \(2,\) in another"):
        builder.tensor("w", "BF16", (2,), again=True)
    with pytest.raises(UnsupportedError, match="dtype torch.quint8 cannot be stored"):
        builder.tensor("q", torch.quint8, (2,))


def test_an_alias_shares_a_tensor_that_may_come_later_and_is_left_out_without_one() -> None:
    builder = CatalogBuilder("test", "here")
    builder.alias("tied", "w")
    builder.alias("nothing", "absent")
    builder.tensor("w", "F32", (2,))
    builder.piece("w", file=builder.file("data", 8), offset=0)
    catalog = builder.finish()
    assert catalog.names == ("tied", "w")
    assert catalog.source(catalog.index("tied")) == catalog.index("w")


def test_a_value_that_cannot_be_encoded_is_unreadable_and_two_of_one_name_collide() -> None:
    builder = CatalogBuilder("test", "here")
    builder.value(("extra", (0,), "step"), 7)
    builder.value(("extra", "model"), torch.nn.Linear(1, 1))
    catalog = builder.finish()
    assert catalog.value_names == ("extra.0.step",)
    assert isinstance(catalog.unreadable["extra.model"], CheckpointError)
    builder.value(("extra.0", "step"), 8)
    with pytest.raises(NameCollisionError, match=r"extra\.0\.step occurs twice"):
        builder.finish()


def test_pieces_beyond_their_file_and_sizes_beyond_64_bits_are_refused() -> None:
    for offset, why in ((4, "here: "), (2**63, "over 2⁶³")):
        builder = CatalogBuilder("test", "here")
        builder.tensor("w", "F32", (2,))
        builder.piece("w", file=builder.file("data", 8), offset=offset)
        with pytest.raises(CorruptError, match=why):
            builder.finish()


def test_views_of_a_torch_file_that_claim_many_times_its_bytes_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(1 << 16)}, tmp_path / "w.pt")
    with open_storage(str(tmp_path)) as storage:
        file = FileReader(storage).open("w.pt")
        builder = CatalogBuilder("test", storage.url)
        builder.tensor("w", "F32", (1 << 16,))
        with pytest.raises(CorruptError, match=r"w\.pt has .* bytes, and is said to hold"):
            builder.view("w", file, file.content["w"])
