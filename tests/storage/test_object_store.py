"""The store of objects, on moto's S3 behind a proxy: the base contract, and the commit by conditional PUT."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.comm import SoloComm
from reshard_ckpt.errors import CorruptError, StorageError, UsageError
from reshard_ckpt.formats.source import locate, open_shared_source
from reshard_ckpt.storage import (
    ABSENT,
    LocksUnsupported,
    PublishConflict,
    Storage,
    object_client,
    object_lease,
    object_store,
    open_below,
    open_beside,
    open_storage,
    resolved_path,
)
from reshard_ckpt.storage.object_lease import LeaseLost, ObjectLease, content
from reshard_ckpt.storage.object_store import PARTS_IN_FLIGHT, ObjectStorage
from reshard_ckpt.storage.protocol import MissingKey, PublishUnknown
from tests.storage.contract import StorageContract, put, read_range
from tests.storage.fault_proxy import FaultProxy, fault_proxy
from tests.storage.object_servers import make_bucket, moto_server, set_endpoint
from tests.warm_python import warm_python


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, FaultProxy]]:
    """Run moto and a proxy before it, at which this process looks for its stores."""
    with moto_server() as endpoint, fault_proxy(endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        set_endpoint(patch, proxy.endpoint)
        yield endpoint, proxy


@pytest.fixture
def proxy(servers: tuple[str, FaultProxy]) -> Iterator[FaultProxy]:
    servers[1].seen.clear()
    yield servers[1]
    servers[1].fault = lambda method, path: ""


@pytest.fixture
def url(servers: tuple[str, FaultProxy]) -> str:
    return f"{make_bucket(servers[0])}/runs/a"


@pytest.fixture
def storage(url: str) -> Iterator[Storage]:
    with open_storage(url) as storage:
        yield storage


class TestObjectStorage(StorageContract):
    many = 30


def test_nothing_is_there_before_a_file_is_finished(storage: Storage, proxy: FaultProxy):
    with storage.create("d/f") as writer:
        writer.write(b"data")
        assert proxy.seen == []
        assert storage.size("d/f") is None
    assert [method for method, _ in proxy.seen] == ["HEAD", "PUT"]


def test_a_large_file_is_sent_in_parts_whose_bytes_are_its_own(storage: Storage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_store, "HINTS", object_store.Hints(part_bytes=5 << 20))
    source = np.arange(13 << 18, dtype=np.uint32)
    wanted = source.tobytes()
    with storage.create("f", source.nbytes) as writer:
        writer.write(memoryview(source[:1000]))
        writer.write(memoryview(source[1000:]))
        source[:] = 0
    assert storage.read("f", 1 << 30) == wanted


def test_a_large_file_whose_last_answer_is_cut_is_there(storage: Storage, monkeypatch: pytest.MonkeyPatch, proxy: FaultProxy):
    monkeypatch.setattr(object_store, "HINTS", object_store.Hints(part_bytes=5 << 20))
    put(storage, "f", b"older")
    with storage.create("f", replace=True) as writer:
        writer.write(bytes(11 << 20))
        proxy.once("cut", "POST", "uploadId")
    assert storage.size("f") == 11 << 20


def test_parts_grow_with_the_file_so_that_they_are_not_too_many(storage: Storage):
    writer = storage.create("f", 1 << 40)
    assert isinstance(writer, object_store.ObjectWriter)
    assert (1 << 40) / writer._part_bytes <= object_store.MAX_PARTS
    writer.abort()


def test_an_aborted_upload_leaves_nothing(storage: Storage, monkeypatch: pytest.MonkeyPatch, proxy: FaultProxy):
    monkeypatch.setattr(object_store, "HINTS", object_store.Hints(part_bytes=5 << 20))
    writer = storage.create("f")
    writer.write(bytes(11 << 20))
    writer.abort()
    assert storage.list() == []
    assert any(method == "DELETE" and "uploadId" in path for method, path in proxy.seen)


# --- the commit ---


@pytest.mark.parametrize("fate", ["drop", "500"])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_publish_whose_answer_is_lost_has_succeeded(storage: Storage, proxy: FaultProxy, fate: str, replaces: bool):
    before = storage.publish("catalog", b"1", expected=ABSENT) if replaces else ABSENT
    storage.publish("other", b"", expected=ABSENT)  # the probe is over
    proxy.once(fate, "PUT", "catalog")
    version = storage.publish("catalog", b"2", expected=before)
    puts = [path for method, path in proxy.seen if method == "PUT" and path.endswith("catalog")]
    assert len(puts) == 2 + replaces  # obstore has sent it again, and was refused
    [found] = storage.read_many(["catalog"], 10)
    assert (found.data, found.version) == (b"2", version)


@pytest.mark.parametrize("fate", ["drop", "cut"])
@pytest.mark.parametrize("number", range(4))
def test_a_lost_answer_to_the_probe_is_asked_for_again(storage: Storage, proxy: FaultProxy, fate: str, number: int):
    puts: list[str] = []

    def fault(method: str, path: str) -> str:
        puts.extend([path] if method == "PUT" and path.endswith("probe") else [])
        return fate if len(puts) == number + 1 and path == puts[-1] else ""

    proxy.fault = fault
    storage.publish("catalog", b"1", expected=ABSENT)
    assert len(puts) > number
    assert storage.list() == [("catalog", 1)]


@pytest.mark.parametrize("fate", ["drop", "500"])
def test_a_lost_answer_to_a_publish_that_was_refused_is_a_conflict(storage: Storage, proxy: FaultProxy, fate: str):
    storage.publish("catalog", b"theirs", expected=ABSENT)
    proxy.once(fate, "PUT", "catalog")
    with pytest.raises(PublishConflict, match="appeared during this save"):
        storage.publish("catalog", b"ours", expected=ABSENT)
    assert storage.read("catalog", 10) == b"theirs"


def test_a_publish_that_never_gets_an_answer_says_that_its_outcome_is_unknown(
    url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(object_store, "_LAST_LOOK_S", 0.2)
    open_storage(url).publish("first", b"", expected=ABSENT)  # the probe is over
    with open_storage(url, timeout_s=0.3) as storage:
        proxy.fault = lambda method, path: "503"
        with pytest.raises(PublishUnknown, match="it may hold the new file or the old one"):
            storage.publish("catalog", b"1", expected=ABSENT)


def test_bursts_of_refusals_are_waited_out(storage: Storage, proxy: FaultProxy):
    refused: dict[tuple[str, str], int] = {}

    def fault(method: str, path: str) -> str:
        refused[method, path] = refused.get((method, path), 0) + 1
        return "503" if refused[method, path] <= 2 else ""

    proxy.fault = fault
    put(storage, "d/f", b"data")
    storage.publish("catalog", b"1", expected=ABSENT)
    assert [found and found.data for found in storage.read_many(["d/f", "catalog", "none"], 10)] == [b"data", b"1", None]
    assert storage.list() == [("catalog", 1), ("d/f", 4)]


def test_a_body_that_is_cut_is_never_taken_for_the_whole(url: str, proxy: FaultProxy):
    data = np.random.default_rng(0).bytes(1 << 20)
    with open_storage(url, timeout_s=5) as storage:
        put(storage, "f", data)
        got = bytearray(len(data))
        proxy.once("cut", "GET", "/f")
        with suppress(StorageError):
            storage.read_into("f", 0, [memoryview(got)])
        assert got in (data, bytes(len(data)))


def test_an_answer_that_is_cut_is_asked_for_again(storage: Storage, proxy: FaultProxy):
    for key in ("a/f", "b/f", "c"):
        put(storage, key, key.encode())
    proxy.once("cut", "GET", "list-type")
    assert storage.list() == [("a/f", 3), ("b/f", 3), ("c", 1)]
    proxy.once("cut", "GET", "list-type")
    assert storage.folders() == ("a", "b")
    proxy.once("cut", "PUT", "copied")
    assert storage.copy(storage, "a/f", "copied")
    proxy.once("cut", "GET", "/none")  # the error of a file that is not there
    assert storage.read_many(["none"], 10) == [None]
    proxy.once("cut", "GET", "/none")
    with pytest.raises(MissingKey):
        read_range(storage, "none", 0, 1)
    proxy.once("cut", "POST", "delete")
    storage.delete(["a/f", "b/f"])
    assert storage.list() == [("c", 1), ("copied", 3)]


@pytest.mark.parametrize(
    ("condition", "why"), [("If-None-Match", r"If-None-Match: \* \(create\)"), ("If-Match", r"If-Match \(update\)")]
)
def test_a_server_that_ignores_conditions_is_refused(
    servers: tuple[str, FaultProxy], condition: str, why: str, monkeypatch: pytest.MonkeyPatch
):
    with fault_proxy(servers[0], drops=condition) as deaf:
        set_endpoint(monkeypatch, deaf.endpoint)
        with open_storage(f"{make_bucket(servers[0])}/run") as storage:
            with pytest.raises(StorageError, match=f"this server ignores {why}"):
                storage.publish("catalog", b"1", expected=ABSENT)
            assert storage.list() == []
    object_client.client_of.cache_clear()


def test_a_server_that_takes_only_bare_etags_is_given_them(servers: tuple[str, FaultProxy], monkeypatch: pytest.MonkeyPatch):
    with fault_proxy(servers[0], bare=True) as strict:
        set_endpoint(monkeypatch, strict.endpoint)
        with open_storage(f"{make_bucket(servers[0])}/run") as storage:
            version = storage.publish("catalog", b"1", expected=ABSENT)
            storage.publish("catalog", b"2", expected=version)
            assert storage.list() == [("catalog", 1)]
    object_client.client_of.cache_clear()


# --- leases ---


def test_an_object_store_has_leases_instead_of_locks(storage: Storage):
    with pytest.raises(LocksUnsupported):
        storage.lock("f", make=True)
    assert not storage.hints.has_locks


def write_lease(storage: Storage, ttl_s: float) -> None:
    """Leave the lease of a process of another machine."""
    storage.publish("run.lock", content(b"job 1", ttl_s).replace(b'"process": ["', b'"process": ["elsewhere-'))


def test_a_lease_of_a_process_that_is_gone_is_taken_over(storage: Storage):
    write_lease(storage, 0.1)
    with storage.lease("run.lock", b"job 2") as lease:
        lease.check()


def test_a_lease_that_is_renewed_is_held(storage: Storage, monkeypatch: pytest.MonkeyPatch):
    write_lease(storage, 3600)
    monkeypatch.setattr(object_lease, "_sleep", lambda _: write_lease(storage, 3600))
    assert storage.lease("run.lock", b"job 2") is None


def test_a_lease_of_a_killed_process_of_this_machine_is_taken_at_once(storage: Storage):
    program = (
        "import os, signal, sys; from reshard_ckpt.storage import open_storage;"
        "lease = open_storage(sys.argv[1]).lease('run.lock', b'job 1', ttl_s=3600);"
        "os.kill(os.getpid(), signal.SIGKILL if lease else signal.SIGTERM)"
    )
    job = subprocess.run([warm_python(), "-c", program, storage.url], check=False)
    assert job.returncode == -signal.SIGKILL
    with storage.lease("run.lock", b"job 2") as lease:
        assert lease is not None


def test_a_lost_lease_is_a_named_error(storage: Storage):
    with storage.lease("run.lock", b"job 1", ttl_s=3600) as lease:
        assert isinstance(lease, ObjectLease)
        lease.check()
        write_lease(storage, 3600)
        lease._renewed -= 2000  # the thread of the lease had no chance to renew it
        with pytest.raises(LeaseLost, match="another may have taken it: nothing was deleted"):
            lease.check()
    assert b"job 1" in storage.read("run.lock", 1000)  # of the other: a lost lease is not released


def test_a_lease_is_renewed_while_it_is_held(storage: Storage):
    with storage.lease("run.lock", b"job 1", ttl_s=0.3) as lease:
        assert isinstance(lease, ObjectLease)
        first = lease._version
        deadline = time.monotonic() + 60
        while lease._version == first:
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)


def test_of_many_that_take_a_lease_one_succeeds(url: str):
    storages = [open_storage(url) for _ in range(6)]
    barrier = threading.Barrier(6)

    def take(storage: Storage) -> object:
        barrier.wait()
        return storage.lease("run.lock", b"job")

    with ThreadPoolExecutor(6) as pool:
        leases = list(pool.map(take, storages))
    held = [lease for lease in leases if lease is not None]
    assert len(held) == 1
    held[0].release()  # type: ignore[attr-defined]


# --- places ---


def test_urls_are_normalised_and_odd_ones_refused(url: str):
    assert resolved_path(f"{url}/") == url == open_storage(url + "//").url
    for wrong in ("s3://", "s3:///x", "s3://b", f"{url}/../b", f"{url}//b/c", f"{url}/./b"):
        with pytest.raises(UsageError):
            resolved_path(wrong)


def test_references_stay_below_the_prefix_of_the_run(url: str):
    step = open_storage(f"{url}/step_2")
    assert open_beside(step, "../step_1", "f").url == f"{url}/step_1"
    assert open_beside(step, "..", "f").url == url
    for outside in ("../../b/step_1", "../../../other/step_1", "../../a2"):
        with pytest.raises(CorruptError, match="refers to files at"):
            open_beside(step, outside, "f")


# --- errors ---


def test_a_writer_holds_a_bounded_number_of_parts(proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch):
    """Parts that the writer has taken, less those that the store may have: never more than are sent at once, and one."""
    part_bytes, num_parts = 5 << 20, 16  # the smallest that the stores take
    monkeypatch.setattr(object_store, "HINTS", replace(object_store.HINTS, part_bytes=part_bytes))
    gate = threading.Condition()
    waiting = passed = taken = most_waiting = most_held = 0

    def hold(method: str, path: str) -> str:
        """Hold each part back until as many wait as are sent at once, or until the writer has given its last."""
        nonlocal waiting, passed, most_waiting
        if "partNumber" in path:
            with gate:
                waiting += 1
                most_waiting = max(most_waiting, waiting)
                gate.notify_all()
                assert gate.wait_for(lambda: waiting >= PARTS_IN_FLIGHT or taken + 1 >= num_parts, timeout=60)
                waiting, passed = waiting - 1, passed + 1
                gate.notify_all()
        return ""

    data = [bytes([number]) * part_bytes for number in range(num_parts)]
    with open_storage(url) as storage:
        proxy.fault = hold
        with storage.create("f") as writer:
            for part in data:
                writer.write(part)
                with gate:
                    taken += 1
                    most_held = max(most_held, taken - passed)
                    gate.notify_all()
        proxy.fault = lambda method, path: ""
        assert storage.read("f", 1 << 30) == b"".join(data)
    assert most_waiting == PARTS_IN_FLIGHT
    assert most_held <= PARTS_IN_FLIGHT + 1


def test_a_load_holds_a_bounded_number_of_bytes(proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch):
    """Bytes that the store was asked for at any time: never more than reads at once, each of a request's size."""
    saved = {"w": torch.arange(12 << 20, dtype=torch.int32)}
    checkpoint.save(f"{url}/a", saved)
    monkeypatch.setattr(object_store, "HINTS", replace(object_store.HINTS, requests=9, read_bytes=2 << 20))
    asked, now, most = threading.Lock(), 0, 0
    read_into = ObjectStorage.read_into

    def counted(self: ObjectStorage, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        nonlocal now, most
        length = sum(map(len, buffers))
        with asked:
            now += length
            most = max(most, now)
        try:
            read_into(self, key, offset, buffers)
        finally:
            with asked:
                now -= length

    monkeypatch.setattr(ObjectStorage, "read_into", counted)
    loaded = {"w": torch.zeros_like(saved["w"])}
    checkpoint.load(f"{url}/a", loaded)
    assert torch.equal(loaded["w"], saved["w"])
    assert 2 << 20 < most <= 9 * (2 << 20)


def test_errors_name_the_place_and_no_secret(servers: tuple[str, FaultProxy], monkeypatch: pytest.MonkeyPatch):
    with open_storage("s3://there-is-no-such-bucket/run", timeout_s=5) as storage, pytest.raises(StorageError) as caught:
        put(storage, "f")
    assert "no-such-bucket/run/f: cannot write: 404 Not Found NoSuchBucket; make the bucket first" in str(caught.value)
    assert caught.value.__suppress_context__
    hidden = object_client._reason(OSError("GET https://a.blob/x?sv=1&sig=SECRET failed"))
    assert hidden == "GET https://a.blob/x?… failed; look at the store and the network, then try again"
    no_token = object_client._reason(OSError("PUT http://host/token: status code: 403 Forbidden: denied"))
    assert no_token == "403 Forbidden; check the credentials and their rights (docs/object-stores.md)"


def test_a_load_waits_for_a_server_that_is_away_no_longer_than_its_timeout(monkeypatch: pytest.MonkeyPatch):
    set_endpoint(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"retry_timeout: 1s.*; look at the store and the network, then try again"):
        checkpoint.load("s3://bucket/run", {"w": torch.zeros(2)}, timeout_s=1)


@pytest.mark.parametrize(
    "opened",
    [
        lambda step: open_beside(step, "../step_1", "f"),
        lambda step: open_below(step, "a"),
        lambda step: locate(step.url, step.hints.retry_s)[0],
    ],
    ids=["beside", "below", "located"],
)
def test_stores_near_another_one_wait_no_longer_than_it(monkeypatch: pytest.MonkeyPatch, opened: Callable[[Storage], Storage]):
    set_endpoint(monkeypatch, "http://127.0.0.1:9")
    near = opened(open_storage("s3://bucket/run/step_2", timeout_s=1))
    with pytest.raises(StorageError, match="retry_timeout: 1s"):
        near.read_into("f", 0, [memoryview(bytearray(1))])


def test_a_file_is_opened_in_a_store_that_waits_no_longer_than_the_one_of_its_path(storage: Storage):
    put(storage, "w.safetensors", bytes([2, *bytes(7)]) + b"{}")
    path = f"{storage.url}/w.safetensors"
    found, key = locate(path, 1)
    assert (key, found.hints.retry_s) == ("w.safetensors", 1)
    with open_shared_source(SoloComm(), path, timeout_s=1) as source:
        assert source.storage.hints.retry_s == 1


def test_a_process_that_was_forked_after_use_is_told(storage: Storage, monkeypatch: pytest.MonkeyPatch):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_size_of_nothing, args=(storage, queue))
    child.start()
    message = queue.get()
    child.join()
    assert "this process was forked after its parent had used an object store" in message


def _size_of_nothing(storage: Storage, queue: multiprocessing.Queue[str]) -> None:
    try:
        storage.size("f")
    except StorageError as error:
        queue.put(str(error))


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(UsageError, match=r"need obstore: pip install 'reshard-ckpt\[cloud\]'"):
        open_storage("gs://a-bucket/run")
