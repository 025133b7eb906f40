"""What an async save promises: it is as consistent as a plain one, says what went wrong, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import CODES
from reshard_ckpt.core.planning.local_metadata import Memo
from reshard_ckpt.engine.saving import async_save, staging, write
from reshard_ckpt.engine.saving.local_shards import describe_local
from reshard_ckpt.engine.saving.staging import Staging, ring_bytes
from reshard_ckpt.engine.saving.write import lay_out
from reshard_ckpt.errors import CheckpointError, StorageError, UsageError
from reshard_ckpt.storage.local import LocalStorage, LocalWriter
from tests.jobs import plan_job
from tests.layouts import filled, layouts, shapes, spec_of, values_of
from tests.tries import examples


class Model(torch.nn.Module):
    """A model with what forward changes (running statistics) and what no optimizer owns (an average of the weights)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4))
        self.average = torch.nn.ParameterDict(
            {n.replace(".", "_"): p.detach().clone().requires_grad_(False) for n, p in self.inner.named_parameters()}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def update_average(self) -> None:
        for name, param in self.inner.named_parameters():
            self.average[name.replace(".", "_")].data.lerp_(param.detach(), 0.1)


def train(model: Model, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    loss = model(torch.randn(16, 8, generator=generator)).square().mean()
    model.update_average()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def same(one: dict, other: dict) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(v, other[k]) if torch.is_tensor(v) else v == other[k] for k, v in one.items())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Background copies wait until this is set."""
    opened = threading.Event()
    stage = async_save.SaveThread._stage

    def held(self: async_save.SaveThread, fill: object) -> None:
        if threading.current_thread().name == "reshard-ckpt-stage":
            opened.wait(600)
        stage(self, fill)

    monkeypatch.setattr(async_save.SaveThread, "_stage", held)
    yield opened
    opened.set()


def test_a_thread_whose_start_was_interrupted_copies_nothing_later(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    """The caller has given the save up, and its staging memory, which the next save may use by then."""
    start, started = async_save._thread, list[threading.Thread]()

    def interrupted(name: str, target: Callable[[], object]) -> threading.Thread:
        started.append(start(name, target))
        if name == "reshard-ckpt-stage":
            raise KeyboardInterrupt
        return started[-1]

    model = Model()
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    with mock.patch.object(async_save, "_thread", interrupted), pytest.raises(KeyboardInterrupt):
        checkpoint.async_save(tmp_path / "ckpt", state, staging="lazy")
    copies: list[object] = []
    monkeypatch.setattr(staging, "copy_run", lambda *args, **options: copies.append(args))
    gate.set()
    for thread in started:
        thread.join()
    assert [thread.name for thread in started] == ["reshard-ckpt-save", "reshard-ckpt-stage"]
    assert copies == []
    assert not (tmp_path / "ckpt" / "catalog.msgpack").exists()


@pytest.mark.parametrize("optimizer_type", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("budget", [None, 1])
@pytest.mark.parametrize("kind", ["eager", "lazy"])
def test_an_async_checkpoint_is_the_state_at_the_call(
    tmp_path: Path, kind: str, budget: int | None, optimizer_type: type
) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_type(model.inner.parameters(), lr=0.1)
    for step in range(6):
        train(model, optimizer, step)
        state = {"model": model, "optimizer": optimizer, "extra": {"step": step, "long": list(range(5000))}}
        checkpoint.save(tmp_path / "plain", state)
        handle = checkpoint.async_save(tmp_path / "async", state, staging=kind, host_buffer_bytes=budget)
        if kind == "eager":
            for param in model.parameters():
                param.data.add_(1)
            train(model, optimizer, 100 + step)
            handle.result(600)
            checkpoint.load(tmp_path / "plain", {"model": model, "optimizer": optimizer})
        else:
            train(model, optimizer, 100 + step)
            handle.result(600)
        assert same(checkpoint.read(tmp_path / "async"), checkpoint.read(tmp_path / "plain"))


def test_a_lazy_save_copies_after_the_call_and_holds_the_step_back(tmp_path: Path, gate: threading.Event) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.inner.parameters(), lr=0.1)
    train(model, optimizer, 0)
    state = {"model": model, "optimizer": optimizer}
    checkpoint.save(tmp_path / "plain", state)
    handle = checkpoint.async_save(tmp_path / "async", state, staging="lazy")
    # Forward changes the statistics and the average; none of the copies of what the optimizer owns has begun.
    model(torch.randn(16, 8))
    model.update_average()
    assert not handle.done()
    stepped = threading.Event()

    def step() -> None:
        for param in model.inner.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        stepped.set()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join(0.2)
    assert not stepped.is_set()
    gate.set()
    thread.join(600)
    assert stepped.is_set()
    handle.result(600)
    assert same(checkpoint.read(tmp_path / "async"), checkpoint.read(tmp_path / "plain"))
    assert not optimizer._optimizer_step_pre_hooks  # nothing to be removed, from whatever thread, while torch iterates


def test_a_step_past_the_hook_is_found(tmp_path: Path, gate: threading.Event) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.inner.parameters(), lr=0.1)
    train(model, optimizer, 0)
    checkpoint.save(tmp_path, {"model": model})
    handle = checkpoint.async_save(tmp_path, {"model": model, "optimizer": optimizer}, staging="lazy")
    for param in model.inner.parameters():
        param.grad = torch.ones_like(param)
    type(optimizer).step.__wrapped__(optimizer)
    gate.set()
    with pytest.raises(UsageError, match=r"parameters or state of AdamW changed while they were copied.*staging='eager'"):
        handle.result(600)
    assert "optimizer.param_groups" not in checkpoint.read(tmp_path)


@pytest.mark.parametrize("put_back", [False, True])
def test_rows_changed_through_data_while_they_are_copied_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put_back: bool
) -> None:
    """Two rows of 20,000 change through ``.data``, which no version counter shows, and not in the elements that are sampled."""
    embedding = torch.nn.Embedding(20_000, 64)  # too large for the detector to compare whole with its state at the call
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    checkpoint.save(tmp_path, {"model": embedding})
    put, before = Staging._put_item, embedding.weight.detach().clone()

    def put_between_changes(self: Staging, item: int) -> int:
        if not put_back:
            copied = put(self, item)
            embedding.weight.data[:2].clamp_(max=-10)
            return copied
        embedding.weight.data[:2].clamp_(max=-10)
        copied = put(self, item)
        embedding.weight.data.copy_(before)
        return copied

    monkeypatch.setattr(Staging, "_put_item", put_between_changes)
    handle = checkpoint.async_save(tmp_path, {"model": embedding, "optimizer": optimizer}, staging="lazy")
    with pytest.raises(UsageError, match=r"parameters or state of SGD changed while they were copied.*staging='eager'"):
        handle.result(600)
    assert "optimizer.param_groups" not in checkpoint.read(tmp_path)


def test_steps_that_run_no_hook_make_lazy_eager(tmp_path: Path, gate: threading.Event) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.inner.parameters(), lr=0.1, capturable=True)
    handle = checkpoint.async_save(tmp_path, {"model": model, "optimizer": optimizer}, staging="lazy")
    handle.result(600)
    assert not gate.is_set()


def test_an_error_in_the_background_is_raised_by_result_or_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, {"a": torch.arange(8.0)})

    def full(*_: object) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(LocalWriter, "write", full)
    handle = checkpoint.async_save(tmp_path, {"a": torch.zeros(8)})
    with pytest.raises(StorageError, match="no space left"):
        handle.result(600)
    checkpoint.async_save(tmp_path, {"a": torch.zeros(8)}).running.wait(600)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="the save before this one failed in the background: no space left"):
        checkpoint.async_save(tmp_path, {"a": torch.zeros(8)})
    checkpoint.async_save(tmp_path, {"a": torch.ones(8)}).result(600)
    assert torch.equal(checkpoint.read(tmp_path)["a"], torch.ones(8))
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 1


def test_what_is_no_checkpoint_error_becomes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(LocalWriter, "write", broken)
    handle = checkpoint.async_save(tmp_path, {"a": torch.zeros(8)})
    with pytest.raises(CheckpointError, match="ZeroDivisionError: oops"):
        handle.result(600)


def test_saves_queue_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going = threading.Event()
    publish = LocalStorage.publish

    def slow(self: LocalStorage, *args: object, **kwargs: object) -> None:
        going.wait(600)
        publish(self, *args, **kwargs)

    monkeypatch.setattr(LocalStorage, "publish", slow)
    first = checkpoint.async_save(tmp_path / "a", {"a": torch.zeros(8)})
    with pytest.raises(TimeoutError, match="not committed after"):
        first.result(0.01)
    with pytest.raises(UsageError, match="still under way"):
        checkpoint.async_save(tmp_path / "b", {"a": torch.zeros(8)}, when_busy="error")
    going.set()
    checkpoint.save(tmp_path / "b", {"a": torch.zeros(8)})
    assert first.done()
    first.result()


def test_staging_memory_is_reused_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    allocate = async_save.POOL.take.__func__.__globals__["allocate"]

    def counted(num_bytes: int, *, pinned: bool) -> torch.Tensor:
        made.append(num_bytes)
        return allocate(num_bytes, pinned=pinned)

    monkeypatch.setitem(async_save.POOL.take.__func__.__globals__, "allocate", counted)
    async_save.POOL.clear()
    state = {"a": torch.arange(12 << 20, dtype=torch.int32)}
    checkpoint.prepare(state)
    assert len(made) == 1
    for _ in range(3):
        checkpoint.async_save(tmp_path, state).result(600)
    assert len(made) == 1
    async_save.POOL.clear()
    checkpoint.async_save(tmp_path, state, host_buffer_bytes=20 << 20).result(600)
    assert made[1:] == [20 << 20]
    assert torch.equal(checkpoint.read(tmp_path)["a"], state["a"])


@given(st.data())
@examples(150)
def test_any_layout_streams_through_a_ring_of_any_size(data: st.DataObject) -> None:
    step = staging.STEP_BYTES
    staging.STEP_BYTES = 64
    try:
        tensors, wholes = [], []
        for i in range(data.draw(st.integers(1, 3))):
            dtype = data.draw(st.sampled_from(CODES))
            layout = data.draw(layouts(data.draw(shapes()), 1))
            wholes.append(values_of(layout.shape, dtype, i))
            tensors.append((spec_of(layout, 0, f"t{i}", dtype), filled(layout, 0, wholes[-1])))
        local_shards = describe_local(tensors, [], None, 0)
        _, _, (assignment,) = plan_job([local_shards])
        write._FILES = Memo(2)
        with mock.patch.object(write, "HEADER_BYTES", data.draw(st.sampled_from([1, 1 << 20]))):
            files = lay_out(local_shards, assignment, 0)
        ring = torch.zeros(data.draw(st.sampled_from([64, 128, ring_bytes(files) or 64])), dtype=torch.uint8)
        image = Staging(local_shards, assignment, files, ring)

        def fill() -> None:
            image.fill(lambda _: True)
            image.finish()

        thread = threading.Thread(target=fill)
        thread.start()
        drained = [b"".join(bytes(chunk) for chunk in image.drain(file)) for file in files]
        thread.join(600)
        for file, bytes_of_file in zip(files, drained, strict=True):
            assert len(bytes_of_file) == file.num_bytes
            assert bytes_of_file.startswith(file.header)
        flat = b"".join(d[len(f.header) :] for f, d in zip(files, drained, strict=True))
        assert len(flat) == sum(w.numel() * w.element_size() for w in wholes)
    finally:
        staging.STEP_BYTES = step


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="staging='later': pass one of 'eager', 'lazy'"):
        checkpoint.async_save(tmp_path, {"a": torch.zeros(1)}, staging="later")


def test_who_holds_changes_back_is_checked(tmp_path: Path) -> None:
    state = {"a": torch.zeros(1)}
    with pytest.raises(UsageError, match="hold='nobody': pass one of 'optimizers', 'caller'"):
        checkpoint.async_save(tmp_path, state, staging="lazy", hold="nobody")
    with pytest.raises(UsageError, match="hold='caller' is for staging='lazy'"):
        checkpoint.async_save(tmp_path, state, hold="caller")
    with pytest.raises(UsageError, match=r"hold: Linear\(.*is not a torch optimizer"):
        checkpoint.async_save(tmp_path, state, staging="lazy", hold=[torch.nn.Linear(1, 1)])
    with pytest.raises(UsageError, match="hold=3: pass 'optimizers', 'caller', an optimizer, or a list"):
        checkpoint.async_save(tmp_path, state, staging="lazy", hold=3)


def test_where_the_caller_holds_nothing_is_copied_before_the_call_returns(tmp_path: Path, gate: threading.Event) -> None:
    state = {"s": {"a": torch.arange(1000.0), "list": [torch.arange(7)]}}
    handle = checkpoint.async_save(tmp_path, state, staging="lazy", hold="caller")
    state["s"]["a"].neg_()  # before `staged`, to see when it is copied
    gate.set()
    handle.staged()
    state["s"]["a"].zero_()
    handle.result(600)
    assert torch.equal(checkpoint.read(tmp_path)["s.a"], -torch.arange(1000.0))


@pytest.mark.parametrize("as_list", [False, True])
def test_an_optimizer_that_is_not_in_the_state_is_held_back(tmp_path: Path, gate: threading.Event, as_list: bool) -> None:
    weights = [torch.nn.Parameter(torch.full((100,), float(i))) for i in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    handle = checkpoint.async_save(
        tmp_path, {"s": weights[0].detach()}, staging="lazy", hold=optimizers if as_list else optimizers[0]
    )
    for weight in weights:
        weight.grad = torch.ones(100)
    stepped = threading.Thread(target=optimizers[0].step)
    stepped.start()
    if not as_list:
        optimizers[1].step()  # is held by nobody
    gate.set()
    stepped.join(600)
    handle.result(600)
    assert torch.equal(checkpoint.read(tmp_path)["s"], torch.zeros(100))
    assert torch.equal(weights[0].detach(), torch.full((100,), -1.0))


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    for _ in range(5):
        checkpoint.async_save(tmp_path, {"a": torch.zeros(8)}).result(600)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), thread.name


def test_a_load_waits_for_what_a_lazy_save_still_copies(tmp_path: Path, gate: threading.Event) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.inner.parameters(), lr=0.1)
    train(model, optimizer, 0)
    state = {"model": model, "optimizer": optimizer}
    checkpoint.save(tmp_path / "first", state)
    train(model, optimizer, 1)
    checkpoint.save(tmp_path / "second", state)
    handle = checkpoint.async_save(tmp_path / "async", state, staging="lazy")
    threading.Timer(0.1, gate.set).start()
    checkpoint.load(tmp_path / "first", state)
    handle.result(600)
    assert same(checkpoint.read(tmp_path / "async"), checkpoint.read(tmp_path / "second"))


def test_what_fails_before_the_thread_runs_is_raised_at_once_and_leaves_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("no host memory")

    monkeypatch.setattr(async_save, "take_ring", refuse)
    with pytest.raises(MemoryError, match="no host memory"):
        checkpoint.async_save(tmp_path, {"a": torch.zeros(8)})
    monkeypatch.undo()
    checkpoint.async_save(tmp_path, {"a": torch.ones(8)}).result(600)
    assert checkpoint.read(tmp_path)["a"][0] == 1


@pytest.mark.parametrize("call", [checkpoint.prepare, lambda state, **given: checkpoint.async_save("unused", state, **given)])
@pytest.mark.parametrize("size", [-5, 0, 1.5, "1GB"])
def test_a_staging_buffer_of_no_size_is_refused(call: Callable[..., object], size: object):
    with pytest.raises(UsageError, match="host_buffer_bytes="):
        call({"a": torch.zeros(8)}, host_buffer_bytes=size)
