"""The targets of fuzzing: one function for each decoder: it may return or raise a `CheckpointError`, and nothing else.

Each target has seeds, made by real encoders, and some a mutator that knows their structure, as checksums and lengths would stop
nearly all that chance alone makes.
"""

from __future__ import annotations

import argparse
import atexit
import io
import os
import pickletools
import random
import shutil
import tempfile
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgpack
import numpy as np
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors import deserialize
from safetensors.torch import save as save_safetensors

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointError, UnsupportedError
from reshard_ckpt.format.catalog import decode_catalog, encode_catalog
from reshard_ckpt.format.catalog_check import problems
from reshard_ckpt.format.files import BlockHasher, decode_digests, decode_manifest, encode_manifest, num_blocks
from reshard_ckpt.format.shard_file import parse_header
from reshard_ckpt.format.timeline import decode_timeline
from reshard_ckpt.format.values import decode_path, decode_value, encode_value
from reshard_ckpt.storage import open_storage
from reshard_ckpt.torchfile.archive import read_object
from tests.reliability.hostile import mutated_bytes, mutated_catalog, mutated_node

Mutate = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """A decoder, some real inputs, and how to change one so that it still looks like one."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]
    mutate: Mutate | None = None
    max_bytes: int = 1 << 14


URL = f"memory://{uuid.uuid4().hex}"
SCRATCH = Path(os.environ.get("FUZZ_SCRATCH") or tempfile.mkdtemp(prefix="fuzz-"))
"""Where files lie that are opened by path; a fuzzed process does not end in a way that could remove it, so its parent does."""

if "FUZZ_SCRATCH" not in os.environ:
    atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)


def sample() -> dict[str, object]:
    """A state with everything that a catalog can hold."""
    whole = torch.arange(60.0).reshape(5, 12)
    return {
        "t": {
            "w": whole,
            "tied": whole,
            "b": torch.ones(3, dtype=torch.bfloat16),
            "empty": torch.zeros(0, 4),
            "x": torch.tensor(1),
        },
        "extra": {"step": 3, "long": list(range(3000)), "own": checkpoint.PerRank({"seed": 7}), "text": "é"},
    }


def save_sample() -> bytes:
    checkpoint.save(URL, sample(), metadata={"run": (1, 2.5)}, mesh={"dp": 1})
    with open_storage(URL) as storage:
        return storage.read("catalog.msgpack", 1 << 20)


def run_catalog(data: bytes) -> None:
    """A catalog that is accepted is used, too, over the files of the sample."""
    catalog = decode_catalog(data)
    assert not list(problems(catalog))
    list(catalog.tensors())  # indices lead somewhere
    catalog.summary()
    with suppress(UnsupportedError):  # metadata of any kind of value
        assert decode_catalog(encode_catalog(catalog)).names == catalog.names
    with open_storage(URL) as storage:
        storage.publish("catalog.msgpack", data)
    target = {name: torch.zeros(5, 12) for name in ("t.w", "t.b")}
    for use in (
        lambda: checkpoint.verify(URL),
        lambda: checkpoint.inspect(URL),
        lambda: checkpoint.read(URL),
        lambda: checkpoint.load(URL, target, strict=False, verify=False, allow_resize=True),
    ):
        with suppress(CheckpointError):
            use()


def catalog_seeds() -> Iterator[bytes]:
    from tests.format.building import Run, Tensor, build, position_bytes

    yield save_sample()
    cut = (Run((0, 0), (2, 6), 0, 12, 0), Run((2, 0), (2, 6), 0, 5, 1), Run((2, 0), (2, 6), 5, 7, 0))
    tensors = [Tensor("a", "F32", (4, 6), position_bytes(0, 96), cut), Tensor("e", "U8", (0, 3))]
    yield encode_catalog(build(tensors, num_files=2, values={"extra.step": 7}, per_rank=["own", None]).catalog)


def run_header(data: bytes) -> None:
    parsed = parse_header(data, file_size=None)
    # What is accepted here is accepted by safetensors.
    deserialize(data[: parsed.num_bytes] + bytes(sum(member.num_bytes for member in parsed.members)))
    for member, offset in zip(parsed.members, parsed.offsets, strict=True):
        assert offset >= parsed.num_bytes
        assert member.num_bytes >= 0


def file_seeds() -> Iterator[bytes]:
    yield save_safetensors(
        {"w": torch.arange(6.0).reshape(2, 3), "b@[0:2]#[1:2]": torch.ones(2, dtype=torch.float16)}, {"format": "pt"}
    )
    yield save_safetensors({"empty": torch.zeros(0, 3), "s": torch.tensor(True)})
    yield save_safetensors({"w": torch.ones(2, 3)}, {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [2, 0]}}'})


def with_length(change: Mutate) -> Mutate:
    """Change the JSON of a safetensors file, and put the right length before it."""

    def mutate(data: bytes, chance: random.Random) -> bytes:
        end = 8 + int.from_bytes(data[:8], "little")
        if not 8 < end <= len(data):
            return mutated_bytes(data, chance)
        text = change(data[8:end], chance)
        return len(text).to_bytes(8, "little") + text + data[end:]

    return mutate


def mutated_json(text: bytes, chance: random.Random) -> bytes:
    """Numbers and names of a JSON text changed for others."""
    edges = [
        "0",
        "-1",
        "1e9",
        "9223372036854775807",
        "18446744073709551616",
        "[]",
        "{}",
        "null",
        '"F32"',
        "[0,0]",
        "[" * 50,
        "1" * 40,
    ]
    parts = text.split(b":")
    at = chance.randrange(len(parts))
    rest = parts[at].split(b",")
    rest[chance.randrange(len(rest))] = chance.choice(edges).encode()
    parts[at] = b",".join(rest)
    return b":".join(parts) if chance.random() < 0.8 else mutated_bytes(text, chance)


def run_digests(data: bytes) -> None:
    for size in (0, 200_000, int.from_bytes(data[16:24], "little")):
        with suppress(CheckpointError):
            digests = decode_digests(data, size)
            assert len(digests.values) == num_blocks(size, digests.block_bytes)


def digests_seeds() -> Iterator[bytes]:
    for size in (0, 10, 200_000):
        hasher = BlockHasher()
        hasher.update(bytes(size))
        yield hasher.finish()


def run_value(data: bytes) -> None:
    with suppress(CheckpointError):
        decode_path(data)
    value = decode_value(data)
    with suppress(UnsupportedError):
        assert encode_value(decode_value(encode_value(value, "")), "") == encode_value(value, "")


def value_seeds() -> Iterator[bytes]:
    values = [
        {"lr": 0.5, 3: (1, None)}, [1, -(2**70), 2.5, "é", b"x", True], {1, 2}, np.arange(6.0).reshape(2, 3), np.str_("a"),
        torch.arange(3), torch.float16, torch.Size([2]), torch.device("cpu"), np.dtype("<f4"), np.datetime64("2026-01-01"),
        1 + 2j, torch.nn.Linear(1, 1).state_dict(),
    ]  # fmt: skip
    yield from (encode_value(value, "") for value in values)


def mutated_value(data: bytes, chance: random.Random) -> bytes:
    try:
        node = msgpack.unpackb(data, strict_map_key=False)
        return bytes(msgpack.packb(mutated_tree(node, chance)))
    except Exception:
        return mutated_bytes(data, chance)


def mutated_tree(node: object, chance: random.Random) -> object:
    """One node of a tree changed."""
    if isinstance(node, dict) and node and chance.random() < 0.8:
        key = chance.choice(list(node))
        if chance.random() < 0.2:
            return {
                chance.choice(["int", "set", "dict", "deque", "Counter", "numpy.ndarray", "torch.Tensor", "numpy.scalar"]): node[
                    key
                ]
            }
        return {**node, key: mutated_tree(node[key], chance)}
    if isinstance(node, list) and node and chance.random() < 0.8:
        at = chance.randrange(len(node))
        return [*node[:at], mutated_tree(node[at], chance), *node[at + 1 :]]
    return mutated_node(node, chance, {"x": node})


def run_timeline(data: bytes) -> None:
    decode_timeline(data, where="x").chrome_trace()


def timeline_seeds() -> Iterator[bytes]:
    save_sample()
    with open_storage(URL) as storage:
        yield from (storage.read(key, 1 << 20) for key, _ in storage.list() if key.endswith("timeline.msgpack"))


def foreign(name: str) -> Callable[[bytes], None]:
    """Open a path below which these bytes are one file, as a user would."""

    def run(data: bytes) -> None:
        (SCRATCH / name).parent.mkdir(exist_ok=True)
        (SCRATCH / name).write_bytes(data)
        where = SCRATCH / name if name.count("/") == 0 else (SCRATCH / name).parent
        with suppress(CheckpointError):
            checkpoint.verify(where)
        with suppress(CheckpointError):
            catalog, read = checkpoint.catalog(where), checkpoint.read(where)
            # Damage may change elements, as these files have no checksums, but no shape that the catalog says.
            assert all(read[name].shape == catalog.shape(catalog.index(name)) for name in catalog.names)
            assert all(prod(catalog.shape(i)) < 10_000 for i in range(len(catalog.names)))

    return run


def run_manifest(data: bytes) -> None:
    for path, digest in decode_manifest(data, where="here").items():
        assert path
        assert len(digest) == 32


def manifest_seeds() -> Iterator[bytes]:
    yield encode_manifest({"catalog.msgpack": bytes(range(32)), "s/rank00000-0.safetensors": bytes(32)})


def index_seeds() -> Iterator[bytes]:
    folder = SCRATCH / "hub"
    folder.mkdir(exist_ok=True)
    (folder / "a.safetensors").write_bytes(next(file_seeds()))
    yield b'{"metadata":{"total_size":28},"weight_map":{"w":"a.safetensors","b@[0:2]#[1:2]":"a.safetensors"}}'


def torch_seeds() -> Iterator[bytes]:
    for value in ({"w": torch.arange(6.0).reshape(2, 3), "step": 3}, {"model": {"w": torch.ones(2).half()}, "x": [1, "a"]}):
        out = io.BytesIO()
        torch.save(value, out)
        yield out.getvalue()


def mutated_zip(data: bytes, chance: random.Random) -> bytes:
    """One record of a zip changed, and all its checksums made right."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            records = [(info, old.read(info)) for info in old.infolist()]
        chosen = chance.randrange(len(records))
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as new:
            for i, (info, record) in enumerate(records):
                new.writestr(info.filename, mutated_bytes(record, chance) if i == chosen else record)
        return out.getvalue()
    except Exception:
        return mutated_bytes(data, chance)


def dcp_folder(name: str, *, own: bool = False) -> Path:
    """A folder of torch's DCP: tensors in several orders of memory, values, an optimizer; with `own` metadata of two ranks."""
    state = {
        "model": {"w": torch.arange(60.0).reshape(5, 12), "t": torch.arange(6.0).reshape(2, 3).t(), "e": torch.zeros(0, 3)},
        "optimizer": {"state": {"w": {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
        "extra": {"step": 3, "list": [{"a": 1}, {"b": (2, "x")}]},
    }
    folder = SCRATCH / name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(state, checkpoint_id=folder)
    if own:
        for rank in range(2):
            shutil.copy(folder / ".metadata", folder / f"__{rank}.metadata")
        (folder / ".metadata").unlink()
    return folder


def dcp_seeds(name: str, key: str, *, own: bool = False) -> Callable[[], Iterator[bytes]]:
    """What torch wrote to one file of such a folder; the others stay as they are."""

    def seeds() -> Iterator[bytes]:
        yield (dcp_folder(name, own=own) / key).read_bytes()

    return seeds


_OPERATIONS = (
    *(bytes([code]) for code in b"012N()}]tuseabR.Q\x81\x85\x86\x87\x88\x90\x91\x93\x94"),
    b"K\xff", b"h\x00", b"h\xff", b"j\xff\xff\xff\xff", b"r\xff\xff\xff\x7f", b"q\x05", b"\x8c\x01a", b"X\xff\xff\xff\xff",
    b"J\xff\xff\xff\xff", b"M\xff\xff", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8a\xff" + b"\x01" * 255, b"G" + b"\x7f" * 8,
    b"\x8d" + b"\xff" * 8, b"\x95" + b"\xff" * 8, b"cos\nsystem\n", b"ctorch\nSize\n",
)  # fmt: skip


def mutated_pickle(data: bytes, chance: random.Random) -> bytes:
    """Some operations of a pickle left out, said again, exchanged, or others in their place."""
    starts = [at for _, _, at in pickletools.genops(data)]
    parts = [data[low:high] for low, high in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(chance.choice([1, 1, 2, 4])):
        at, other = chance.randrange(len(parts)), chance.randrange(len(parts))
        kind = chance.randrange(6)
        if kind == 0:
            parts[at] = b""
        elif kind == 1:
            parts[at] += parts[other]
        elif kind == 2:
            parts[at], parts[other] = parts[other], parts[at]
        elif kind == 3:
            parts[at] = chance.choice(_OPERATIONS)
        elif kind == 4:
            parts[at : at + 1] = parts[at : at + chance.randrange(1, 12)] * chance.choice([2, 3, 50])
        else:
            parts[at] = mutated_bytes(parts[at], chance) if parts[at] else b""
    return b"".join(parts)


def mutated_in_place(data: bytes, chance: random.Random) -> bytes:
    """Some bytes for others, so that all else stays where the metadata say that it is."""
    out = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        at = chance.randrange(len(out))
        new = chance.choice(
            [b"\0", b"\xff", b"\xff" * 4, b"\0" * 4, b"PK\x03\x04", b"PK\x07\x08", bytes([chance.randrange(256)])]
        )
        out[at : at + len(new)] = new
    return bytes(out[: len(data)])


def run_megatron_object(data: bytes) -> None:
    with suppress(CheckpointError):
        encode_value(read_object(data, "object"), "object")


def megatron_object_seeds() -> Iterator[bytes]:
    inner = argparse.Namespace(path=["a", b"b"])
    args = argparse.Namespace(lr=0.5, dtype=torch.bfloat16, inner=inner, device=torch.device("cpu"))
    rng = {"numpy": ("MT19937", np.arange(4, dtype=np.uint32), 3, np.float64(0.5)), "torch": torch.arange(6).reshape(2, 3).t()}
    for value in ({"args": args, "iteration": 7, 0: {(torch.bfloat16, torch.float32): [1]}}, [rng, {1, 2}, torch.Size([2])]):
        out = io.BytesIO()
        torch.save(value, out)
        yield out.getvalue()


TARGETS = {
    "catalog": Target(run_catalog, catalog_seeds, mutated_catalog),
    "header": Target(run_header, file_seeds, with_length(mutated_json)),
    "digests": Target(run_digests, digests_seeds),
    "value": Target(run_value, value_seeds, mutated_value, max_bytes=4096),
    "manifest": Target(run_manifest, manifest_seeds),
    "timeline": Target(run_timeline, timeline_seeds),
    "safetensors": Target(foreign("x.safetensors"), file_seeds, with_length(mutated_json)),
    "index": Target(foreign("hub/model.safetensors.index.json"), index_seeds, mutated_json, max_bytes=4096),
    "torch": Target(foreign("x.pt"), torch_seeds, mutated_zip),
    "dcp_metadata": Target(foreign("dcp/.metadata"), dcp_seeds("dcp", ".metadata"), mutated_pickle),
    "megatron_object": Target(run_megatron_object, megatron_object_seeds, mutated_zip),
    "dcp_of_rank": Target(foreign("own/__1.metadata"), dcp_seeds("own", "__1.metadata", own=True), mutated_pickle),
    "dcp_chunks": Target(foreign("chunks/__0_0.distcp"), dcp_seeds("chunks", "__0_0.distcp"), mutated_in_place),
}
