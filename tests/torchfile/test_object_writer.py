"""Files of ``torch.save`` that are written without torch's pickler: torch reads the same values, and so does this library."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import UnsupportedError
from reshard_ckpt.torchfile.archive import read_object
from reshard_ckpt.torchfile.object_writer import object_bytes

KINDS = {
    "ordered": OrderedDict(b=1, a=[2]),
    "counter": Counter("aab"),
    "factory": defaultdict(int, {1: 2}),
    "no factory": defaultdict(None, {"a": 1}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_dict_keeps_its_class_in_torch_and_becomes_a_plain_one_here(kind):
    data = object_bytes([KINDS[kind]], "x")
    (found,) = torch.load(io.BytesIO(data), weights_only=False)
    assert found == KINDS[kind]
    assert type(found) is type(KINDS[kind])
    assert list(found.items()) == list(KINDS[kind].items())
    assert getattr(found, "default_factory", None) is getattr(KINDS[kind], "default_factory", None)
    assert read_object(data, "x") == [dict(KINDS[kind])]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_comes_back(layout):
    dense = torch.eye(4) * 3
    tensor = dense.to_sparse(layout=layout, blocksize=(2, 2) if "bs" in str(layout) else None)
    found = torch.load(io.BytesIO(object_bytes({"a": tensor}, "x")), weights_only=True)["a"]
    assert found.layout is layout
    assert torch.equal(found.to_dense(), dense)


def test_converting_to_torch_keeps_the_classes_of_values_that_torch_loads(tmp_path):
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    values = {"ordered": KINDS["ordered"], "counter": KINDS["counter"], "listed": [frozen, torch.ones(2).to_sparse()]}
    checkpoint.save(tmp_path / "saved", {"extra": {name: checkpoint.Value(value) for name, value in values.items()}})
    checkpoint.convert(tmp_path / "saved", tmp_path / "x.pt", to="torch")
    found = torch.load(tmp_path / "x.pt", weights_only=True)["extra"]
    assert (type(found["ordered"]), type(found["counter"])) == (OrderedDict, Counter)
    assert (found["ordered"], found["counter"]) == (values["ordered"], values["counter"])
    parameter, sparse = found["listed"]
    assert isinstance(parameter, torch.nn.Parameter)
    assert not parameter.requires_grad
    assert sparse.is_sparse
    assert torch.equal(sparse.to_dense(), torch.ones(2))


def test_converting_to_torch_refuses_a_dict_whose_class_torch_would_not_load(tmp_path):
    checkpoint.save(tmp_path / "saved", {"extra": checkpoint.Value({"a": KINDS["factory"]})})
    with pytest.raises(UnsupportedError, match="torch.load refuses what is in this dict"):
        checkpoint.convert(tmp_path / "saved", tmp_path / "x.pt", to="torch")
