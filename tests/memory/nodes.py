"""Jobs with a memory tier. A node is a folder: its id, and all that it has in memory, are in it, and go with it.

Two folders stand in for two machines here: what tells nodes apart is the id in the folder, and copies go over gloo all the same.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from reshard_ckpt import LocalShard
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.comm import links as links_module
from reshard_ckpt.comm import shared_store
from reshard_ckpt.comm.links import Links, Serving, serving
from reshard_ckpt.errors import CheckpointError, CorruptError, PeerError, StorageError
from reshard_ckpt.memory import tier
from reshard_ckpt.memory.generations import NodeImages
from reshard_ckpt.memory.node import run_path
from reshard_ckpt.memory.slots import HEADER_BYTES, ReadSlot
from reshard_ckpt.memory.tier import MemoryTarget, Tier
from tests.layouts import values_of

WIDTHS = (24, 40, 9)
SHAPE = (12, 5)


class Training:
    """A model and its AdamW in one of several layouts, whose every value follows from its global position and a number.

    Parameters
    ----------
    layout
        ``"fsdp"``: FSDP2 over all ranks; ``"hsdp"``: over two, twice; ``"dp"``: whole on each rank.
    """

    def __init__(self, layout: str) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(WIDTHS)))
        if layout != "dp":
            mesh = (dist.get_world_size(),) if layout == "fsdp" else (2, dist.get_world_size() // 2)
            names = ("shard",) if layout == "fsdp" else ("replicate", "shard")
            fully_shard(self.model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.extra = {"step": 0, "long": "x" * 9000}
        self.state = {"model": self.model, "optimizer": self.optimizer, "extra": self.extra}

    def _tensors(self) -> list[torch.Tensor]:
        out = []
        for parameter in self.model.parameters():
            moments = self.optimizer.state[parameter]
            out += [parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]]
        return out

    def fill(self, number: int) -> None:
        """Give every element its value."""
        for salt, tensor in enumerate(self._tensors()):
            whole = values_of(tuple(tensor.shape), "F32", number * 100 + salt)
            if isinstance(tensor, DTensor):
                whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local()
                tensor = tensor.to_local()
            tensor.copy_(whole)
        self.extra["step"] = number

    def is_filled(self, number: int) -> bool:
        """Whether every element has its value, bit for bit."""
        for salt, tensor in enumerate(self._tensors()):
            whole = values_of(tuple(tensor.shape), "F32", number * 100 + salt)
            found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if not torch.equal(found.view(torch.int32), whole.view(torch.int32)):
                return False
        return self.extra["step"] == number


def rows(number: int, rank: int, size: int, held: torch.Tensor | None = None) -> dict[str, Any]:
    """Some rows of a tensor of each rank: a state for the tests that are not about layouts."""
    first, end = SHAPE[0] * rank // size, SHAPE[0] * (rank + 1) // size
    tensor = values_of(SHAPE, "F32", number)[first:end].clone() if held is None else held
    return {"w": LocalShard(tensor, SHAPE, (first, 0)), "extra": {"step": number}}


def are_rows(state: dict[str, Any], number: int, rank: int, size: int) -> bool:
    """Whether a state is what `rows` makes for this number."""
    wanted = rows(number, rank, size)["w"].tensor
    return torch.equal(state["w"].tensor.view(torch.int32), wanted.view(torch.int32)) and state["extra"]["step"] == number


@dataclass(frozen=True)
class Restored:
    """What a rank found after a restart."""

    step: int
    tier: str
    is_right: bool
    passed_over: tuple[str, ...]
    steps: list[int]
    copies: int


def save_and_be_killed(root: str, folders: Sequence[str], layout: str, until: int, out: str, **memory: Any) -> None:
    """Save every step to memory, of which some go on to the store; then all ranks are killed."""
    rank = dist.get_rank()
    manager = Manager(root, memory=Memory(folder=folders[rank], **memory), persist_every=2)
    training = Training(layout)
    assert manager.load_latest(training.state) is None
    copies, stored = [], []
    for step in range(1, until + 1):
        training.fill(step)
        handle = manager.async_save(step, training.state)
        handle.result()
        copies.append(handle.copies)
        stored.append(handle.persisted() if step < until else None)
    Path(out, f"rank{rank}").write_text(repr((copies, stored, manager.steps())))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def restore(root: str, folders: Sequence[str], layout: str, **memory: Any) -> Restored:
    """Load the newest checkpoint into another layout, go on for a step, and end."""
    rank = dist.get_rank()
    training = Training(layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        manager = Manager(root, memory=Memory(folder=folders[rank], **memory), persist_every="1h")
        with manager:
            loaded = manager.load_latest(training.state)
            is_right = training.is_filled(loaded.step)
            training.fill(loaded.step + 1)
            handle = manager.async_save(loaded.step + 1, training.state)
            handle.result()
    return Restored(loaded.step, loaded.tier, is_right, loaded.passed_over, manager.steps(), handle.copies)


def lose_nodes(root: str, folders: Sequence[str]) -> list[tuple[Any, ...]]:
    """Three nodes; for one copy and for two: save, leave without closing cleanly, lose as many nodes, and restore on the others.

    With no copy, what was saved is left where it is.
    """
    rank, out = dist.get_rank(), []
    manager = Manager(f"{root}/0", memory=Memory(folder=f"{folders[rank]}/0", copies=0), persist_every=1000)
    manager.async_save(7, rows(7, rank, 3)).result()
    manager.__exit__(RuntimeError, RuntimeError(), None)
    groups = {1: dist.new_group([1, 2]), 2: dist.new_group([2])}
    for copies in (1, 2):
        run, folder = f"{root}/{copies}", f"{folders[rank]}/{copies}"
        manager = Manager(run, memory=Memory(folder=folder, copies=copies), persist_every=1000)
        for step in (1, 2, 3):
            handle = manager.async_save(step, rows(step, rank, 3))
            handle.result()
        manager.__exit__(RuntimeError, RuntimeError(), None)  # nothing goes to the store
        dist.barrier()
        if rank < copies:
            shutil.rmtree(folder)
        dist.barrier()
        if rank >= copies:
            group, place, size = groups[copies], rank - copies, 3 - copies
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                with Manager(run, memory=Memory(folder=folder, copies=copies), process_group=group) as again:
                    state = rows(0, place, size)
                    loaded = again.load_latest(state)
            out.append((copies, handle.copies, loaded.step, loaded.tier, are_rows(state, 3, place, size), again.steps()))
        dist.barrier()
    return out


def be_damaged(root: str, folders: Sequence[str]) -> dict[str, Any]:
    """Two nodes with a copy each: bits turned over in memory, and on the way; and a copy that comes too late."""
    rank, out = dist.get_rank(), {}
    memory = Memory(folder=folders[rank])

    def saved(manager: Manager, step: int) -> Any:
        handle = manager.async_save(step, rows(step, rank, 2))
        handle.result()
        return handle

    def reloaded(place: int = 1 - rank) -> tuple[Any, ...]:
        """Load what is in memory alone: by default what the other rank saved."""
        if rank == 0:
            for step in (5, 6):
                shutil.rmtree(Path(root, f"step_{step}"), ignore_errors=True)
        dist.barrier()
        manager = Manager(root, memory=memory, persist_every=1000)
        state = rows(0, place, 2)
        try:
            found = manager.load_latest(state)
            return found.step, found.tier, are_rows(state, found.step, place, 2), found.passed_over
        finally:
            manager.__exit__(RuntimeError, RuntimeError(), None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = Manager(root, memory=memory, persist_every=1000)
        manager.save(1, rows(1, rank, 2))
        handles = {step: saved(manager, step) for step in (2, 3)}
        out["copies"] = [handle.copies for handle in handles.values()]

        swap = Links.swap

        ends: set[float] = set()

        def damaged(links: Links, outgoing: Any, incoming: Any, by: float) -> None:
            ends.add(by)
            swap(links, outgoing, incoming, by)
            for data in incoming.values():
                if len(data) > HEADER_BYTES and rank == 1:
                    data[17] ^= 4

        Links.swap = damaged  # type: ignore[method-assign]
        handles[4] = saved(manager, 4)
        Links.swap = swap  # type: ignore[method-assign]
        assert len(ends) == 1  # headers and bodies together have one time
        out["damaged on the way to a copy"] = (
            handles[4].copies,
            [str(w.message) for w in caught if "damaged on its way" in str(w.message)],
        )

        def late(*_: Any) -> None:
            raise PeerError("too late")

        Links.swap = late if rank == 0 else swap  # type: ignore[method-assign]
        handed = manager._memory._tier._timeout_s  # type: ignore[union-attr]
        manager._memory._tier._timeout_s = 2  # type: ignore[union-attr]
        handles[5] = saved(manager, 5)
        Links.swap = swap  # type: ignore[method-assign]
        manager._memory._tier._timeout_s = handed  # type: ignore[union-attr]
        handles[6] = saved(manager, 6)
        out["late"] = handles[5].copies, handles[6].copies
        manager.__exit__(RuntimeError, RuntimeError(), None)
        dist.barrier()

        here = run_path(folders[rank], root)

        def flip_in_memory(step: int, of: int) -> None:
            for path in here.glob("*.slot"):
                slot = ReadSlot(str(path))
                if slot.table and slot.table.save_id == handles[step].running.save_id and slot.table.rank == of:
                    with open(path, "r+b") as file:
                        file.seek(HEADER_BYTES + 21)
                        byte = file.read(1)[0]
                        file.seek(HEADER_BYTES + 21)
                        file.write(bytes([byte ^ 1]))
                slot.close()

        if rank == 0:
            flip_in_memory(6, 0)  # rank 1's node has a copy
        dist.barrier()
        out["one copy damaged"] = reloaded(rank)

        if rank == 1:
            flip_in_memory(6, 0)
        dist.barrier()
        out["both copies damaged"] = reloaded()

        lend = NodeImages.lend

        @contextmanager
        def wrong(images: NodeImages, key: str, offset: int, num_bytes: int) -> Iterator[memoryview]:
            with lend(images, key, offset, num_bytes) as data:
                damaged = bytearray(data)
                damaged[8] ^= 1
                yield memoryview(damaged)

        NodeImages.lend = wrong  # type: ignore[method-assign]
        out["damaged on the way back"] = reloaded()
        NodeImages.lend = lend  # type: ignore[method-assign]
    dist.barrier()
    return out


def one_rank_raises(root: str, folders: Sequence[str]) -> tuple[str, list[int]]:
    """Rank 1 leaves the manager by an error and goes on with something else; rank 0 closes, and must not wait for it for ever."""
    rank = dist.get_rank()
    manager = Manager(root, memory=Memory(folder=folders[rank]), persist_every=1000)
    manager.async_save(1, rows(1, rank, 2)).result()
    said = ""
    try:
        if rank == 1:
            manager.__exit__(RuntimeError, RuntimeError(), None)
            Manager(f"{root}/other")  # its next call of all ranks
        else:
            manager.close()
    except CheckpointError as error:
        said = str(error)
    return said, manager.steps()


def saves_differ(root: str, folders: Sequence[str]) -> str:
    """Rank 1 saves to the store, and rank 0 to memory."""
    rank = dist.get_rank()
    manager = Manager(root, memory=Memory(folder=folders[rank]))
    try:
        if rank == 1:
            manager.save(1, rows(1, rank, 2))
        else:
            manager.async_save(1, rows(1, rank, 2)).result()
    except CheckpointError as error:
        return str(error)
    finally:
        manager.__exit__(RuntimeError, RuntimeError(), None)
    return ""


def a_save_fails(root: str, folders: Sequence[str]) -> dict[str, Any]:
    """Saves that fail on one rank, at several moments: what the others learn, and what is whole afterwards."""
    rank, out = dist.get_rank(), {}

    def attempt(manager: Manager, step: int) -> str:
        try:
            manager.async_save(step, rows(step, rank, 2)).result()
        except CheckpointError as error:
            return str(error)
        return ""

    # Two nodes: rank 1 fails before it sends its copy, for which rank 0 does not wait.
    manager = Manager(f"{root}/two", memory=Memory(folder=folders[rank]), persist_every=1000)
    sealed = MemoryTarget._sealed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 1:
            MemoryTarget._sealed = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        out["before its copy"] = attempt(manager, 1), [str(one.message) for one in caught]
        MemoryTarget._sealed = sealed  # type: ignore[method-assign]
    out["the next"] = attempt(manager, 2), manager.steps()
    manager.__exit__(RuntimeError, RuntimeError(), None)

    # One node with two ranks and one generation.
    memory = Memory(folder=f"{folders[0]}/one", copies=0, generations=1)
    manager = Manager(f"{root}/one", memory=memory, persist_every=1000)
    keep, acknowledge = tier.keep_generation, Tier.acknowledge
    out["first"] = attempt(manager, 1)
    tier.keep_generation = _raising  # type: ignore[assignment]
    out["before all have it"] = attempt(manager, 2), manager.steps()
    tier.keep_generation = keep

    def cut_off(self: Tier, comm: Any, generation: Any, *, pin: bool) -> None:
        acknowledge(self, _CutOff(comm), generation, pin=pin)

    if rank == 1:
        Tier.acknowledge = cut_off  # type: ignore[method-assign,assignment]
    out["once rank 0 may have let the older one go"] = attempt(manager, 3)
    Tier.acknowledge = acknowledge  # type: ignore[method-assign]
    manager.__exit__(RuntimeError, RuntimeError(), None)
    dist.barrier()
    manager = Manager(f"{root}/one", memory=memory, persist_every=1000)
    state = rows(0, rank, 2)
    found = manager.load_latest(state)
    out["then"] = found and (found.step, are_rows(state, found.step, rank, 2))
    manager.__exit__(RuntimeError, RuntimeError(), None)
    out["read from another rank"] = read_from_another()
    manager = Manager(f"{root}/behind", memory=memory, persist_every=1)
    out["one that a rank left out"] = [step for step in range(1, 7) if not (step == 2 and rank) and not attempt(manager, step)]
    manager.__exit__(RuntimeError, RuntimeError(), None)
    return out


class _NotingGroup:
    """A gloo group that notes how long its user waits for a message from any rank."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.waits: list[timedelta] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        work = self._group.recv_anysource(tensors, tag)
        return SimpleNamespace(wait=lambda limit: (self.waits.append(limit), work.wait(limit)))


def read_from_another() -> bytes:
    """Read a file of the other rank. That rank waits for requests without a deadline, since others may ask late."""
    rank, data = dist.get_rank(), bytearray(15)
    chunk, links_module.CHUNK_BYTES, ahead, links_module.AHEAD = links_module.CHUNK_BYTES, 2, links_module.AHEAD, 3
    links = Links(*shared_store("read"), rank, 2, timeout_s=600)
    links._group = group = _NotingGroup(links._group)

    @contextmanager
    def lend(key: str, offset: int, num_bytes: int) -> Iterator[memoryview]:
        if offset > 100:
            raise CorruptError("no such bytes")
        yield memoryview(bytearray(range(offset + 100 * rank, offset + 100 * rank + num_bytes)))
        if offset == 9:
            raise CorruptError("the slot was filled anew")

    with serving(links, ["file"], lend) as server:
        for refused in (9, 101):
            with pytest.raises(CorruptError, match=f"rank {1 - rank} could not read file in the memory of its node"):
                server.read(1 - rank, "file", refused, [memoryview(bytearray(5))])
        server.read(1 - rank, "file", 7, [memoryview(data)])
        parts = bytearray(9), bytearray(6)
        server.read(1 - rank, "file", 7, [memoryview(part) for part in parts])
        assert b"".join(parts) == data
    assert min(group.waits) > timedelta(days=300)
    swapped = torch.zeros(15, dtype=torch.uint8)
    own = Links(*shared_store("swap"), rank, 2, timeout_s=600)
    own.swap({1 - rank: torch.arange(15, dtype=torch.uint8) + 100 * rank + 7}, {1 - rank: swapped}, time.monotonic() + 600)
    assert bytes(swapped.tolist()) == data
    links_module.CHUNK_BYTES, links_module.AHEAD = chunk, ahead
    # A rank that leaves by an error waits only shortly for the others' word that they are done.
    links, finish, waits = Links(*shared_store("leave"), rank, 2, timeout_s=600), Serving.finish, []
    Serving.finish = lambda server, wait_s: (waits.append(wait_s), finish(server, 600))  # type: ignore[assignment,method-assign]
    with suppress(PeerError), serving(links, ["file"], lend):
        raise PeerError("another rank failed")
    Serving.finish = finish  # type: ignore[method-assign]
    assert waits == [links_module._FAREWELL_S]
    return bytes(data)


def _raising(*_: Any) -> None:
    raise StorageError("no space")


class _CutOff:
    """A session of which this rank does not learn any more how a gather ended, as when the process of rank 0 was killed."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def undo_unless_gathered(self, undo: Any) -> None:
        self._comm.undo_unless_gathered(undo)

    def gather(self, payload: bytes) -> None:
        self._comm.gather(payload)
        raise PeerError("the store does not answer")
