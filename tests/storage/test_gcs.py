"""The store of objects on a double of Google Cloud Storage: no test has met the real one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import StorageError
from reshard_ckpt.storage import ABSENT, PublishConflict, Storage, open_storage
from reshard_ckpt.storage.object_client import client_of
from tests.storage.contract import StorageContract
from tests.storage.fault_proxy import FaultProxy, fault_proxy
from tests.storage.gcs_double import GcsDouble, gcs_server, set_gcs


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[GcsDouble, FaultProxy]]:
    client_of.cache_clear()
    with gcs_server() as (endpoint, double), fault_proxy(endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        set_gcs(patch, proxy.endpoint)
        yield double, proxy
    client_of.cache_clear()


@pytest.fixture
def storage(server: tuple[GcsDouble, FaultProxy]) -> Iterator[Storage]:
    with open_storage(f"gs://bucket/{uuid.uuid4().hex}/a") as storage:
        yield storage


class TestGcs(StorageContract):
    many = 30


def test_large_files_go_in_parts(storage: Storage, server: tuple[GcsDouble, FaultProxy]) -> None:
    data = torch.arange(5 << 20, dtype=torch.int32).numpy()
    with storage.create("f", data.nbytes) as writer:
        writer.write(memoryview(data))
    assert storage.read("f", 1 << 30) == data.tobytes()
    assert not server[0].uploads


LARGE = bytes(17 << 20)


@pytest.mark.parametrize("fate", ["drop", "500", "cut"])
def test_a_large_file_whose_last_answer_is_lost_is_there(
    storage: Storage, server: tuple[GcsDouble, FaultProxy], fate: str
) -> None:
    with storage.create("f") as writer:
        writer.write(LARGE)
        server[1].once(fate, "POST", "uploadId")
    assert storage.size("f") == len(LARGE)


def test_an_upload_that_somebody_aborts_says_so(storage: Storage, server: tuple[GcsDouble, FaultProxy]) -> None:
    with storage.create("f") as other:
        other.write(LARGE)
    writer = storage.create("f", replace=True)
    writer.write(LARGE)

    def abort(method: str, path: str) -> str:
        if method == "POST" and "uploadId" in path:
            server[0].uploads.clear()
        return ""

    server[1].fault = abort
    with pytest.raises(StorageError, match="/f: cannot write: 404 Not Found NoSuchUpload; look at the store and the network"):
        writer.finish()


@pytest.mark.parametrize("fate", ["drop", "500"])
def test_a_publish_whose_answer_is_lost_has_succeeded(storage: Storage, server: tuple[GcsDouble, FaultProxy], fate: str) -> None:
    version = storage.publish("catalog", b"1", expected=ABSENT)
    server[1].once(fate, "PUT", "catalog")
    second = storage.publish("catalog", b"2", expected=version)
    with pytest.raises(PublishConflict, match="changed during this save"):
        storage.publish("catalog", b"3", expected=version)
    [found] = storage.read_many(["catalog"], 10)
    assert (found.data, found.version) == (b"2", second)


def test_a_run_is_saved_resharded_and_pruned(storage: Storage) -> None:
    made = {"model": torch.nn.Linear(13, 7), "step": 3}
    with checkpoint.Manager(f"{storage.url}/run", keep_last=1, grace=0) as manager:
        for step in range(3):
            manager.save(step, made)
    checkpoint.reshard(f"{storage.url}/run/step_2", f"{storage.url}/two", mesh={"dp": 2})
    found = checkpoint.read(f"{storage.url}/two")
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in made["model"].state_dict().items())
    with open_storage(f"{storage.url}/run") as run:
        assert run.folders() == ("step_2",)


def test_a_conversion_in_place_and_compact_let_the_store_copy(storage: Storage, server: tuple[GcsDouble, FaultProxy]) -> None:
    """Or copy by themselves, if the server ignores which object a request names, as some do."""
    old, new = {"w": torch.arange(70_000)}, {"w": torch.arange(70_000) * 3, "n": torch.arange(5)}
    for ignores in (False, True):
        server[0].ignores_copies, url = ignores, f"{storage.url}/{ignores}"
        checkpoint.save(f"{url}/old", old)
        checkpoint.save(f"{url}/new", new)
        checkpoint.convert(f"{url}/old", f"{url}/out", to="dcp")
        checkpoint.convert(f"{url}/new", f"{url}/out", to="dcp", overwrite=True)
        checkpoint.save(f"{url}/next", {**new, "n": torch.arange(5) + 9}, base=f"{url}/new")
        checkpoint.compact(f"{url}/next")
        assert not any(file.checkpoint for file in checkpoint.catalog(f"{url}/next").files)
        for path, added in (("out", 0), ("next", 9)):
            found = {name.removeprefix("model."): tensor for name, tensor in checkpoint.read(f"{url}/{path}").items()}
            assert torch.equal(found["w"], new["w"])
            assert torch.equal(found["n"], new["n"] + added)
