"""The store of objects on real servers, SeaweedFS and Azurite: ``make test-stores`` brings them."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import StorageError
from reshard_ckpt.storage import Storage, open_storage
from reshard_ckpt.storage.object_client import client_of
from tests.storage.contract import StorageContract
from tests.storage.object_servers import (
    azurite_server,
    make_bucket,
    make_container,
    rclone_server,
    rclone_serves_s3,
    s3rver_server,
    seaweed_server,
    set_azure,
    set_endpoint,
)


@pytest.fixture(scope="module", params=["seaweed", "azurite"])
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a server, and return a bucket of it."""
    folder = tmp_path_factory.mktemp(request.param)
    client_of.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "azurite":
            if shutil.which("azurite-blob") is None:
                pytest.skip("make test-stores installs Azurite")
            with azurite_server(folder) as endpoint:
                set_azure(patch, endpoint)
                yield make_container(endpoint)
        else:
            if shutil.which("weed") is None and not Path(sys.executable).with_name("weed").exists():
                pytest.skip("make test-stores installs SeaweedFS")
            with seaweed_server(folder) as endpoint:
                set_endpoint(patch, endpoint)
                yield make_bucket(endpoint)
    client_of.cache_clear()


@pytest.fixture
def storage(bucket: str) -> Iterator[Storage]:
    with open_storage(f"{bucket}/{uuid.uuid4().hex}/a") as storage:
        yield storage


class TestServers(StorageContract):
    many = 100


def test_large_files_go_in_parts(storage: Storage) -> None:
    data = torch.arange(10 << 20, dtype=torch.int32).numpy()
    with storage.create("f", data.nbytes) as writer:
        writer.write(memoryview(data))
    assert storage.read("f", 1 << 30) == data.tobytes()


def test_checkpoints_are_resharded_bit_for_bit(storage: Storage, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = {"model": torch.nn.Sequential(torch.nn.Linear(13, 40), torch.nn.Linear(40, 7)), "step": 3}
    checkpoint.save(f"{storage.url}/own", made)
    checkpoint.reshard(f"{storage.url}/own", f"{storage.url}/two", mesh={"dp": 2})
    checkpoint.reshard(f"{storage.url}/two", f"{storage.url}/three", mesh={"dp": 3})
    checkpoint.convert(f"{storage.url}/three", f"{storage.url}/dcp", to="dcp")
    wanted = made["model"].state_dict()
    for path in ("three", "dcp"):
        found = checkpoint.read(f"{storage.url}/{path}")
        assert all(torch.equal(found[f"model.{name}"], value) for name, value in wanted.items())
    with checkpoint.Manager(f"{storage.url}/run", keep_last=1) as manager:
        for step in range(3):
            manager.save(step, made)
    assert checkpoint.verify(f"{storage.url}/run/step_2").ok


@pytest.mark.parametrize(("program", "server", "key"), [("s3rver", s3rver_server, "S3RVER"), ("rclone", rclone_server, "test")])
def test_a_server_that_ignores_conditions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, server: Any, key: str
) -> None:
    if shutil.which(program) is None or (program == "rclone" and not rclone_serves_s3()):
        pytest.skip(f"make test-stores installs {program}")
    with server(tmp_path) as endpoint:
        set_endpoint(monkeypatch, endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key)
        with open_storage("s3://test/run", timeout_s=30) as storage:
            with pytest.raises(
                StorageError, match=r"this server ignores If-None-Match: \* \(create\), so two jobs would overwrite"
            ):
                checkpoint.save("s3://test/run", {"step": 1})
            assert storage.list() == []
    client_of.cache_clear()
