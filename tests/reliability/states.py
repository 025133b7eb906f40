"""The states that are saved, over and over, and the check which of them a path holds.

Every value depends on the state's number, and on its own place; so neither a mixture of two states nor a wrong byte goes unseen.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import Replication, TensorSpec, ValueKind, ValueSpec, box_piece, row_major_strides
from reshard_ckpt.errors import CheckpointNotFound
from reshard_ckpt.format.values import encode_path, encode_value
from tests.layouts import values_of

ROWS = 8
OLD, NEW, NEXT = 1, 2, 3


def tensor(name: str, shape: tuple[int, ...], number: int) -> torch.Tensor:
    return values_of(shape, "F32", number * 131 + len(name))


@cache
def long(number: int) -> bytes:
    """A value that is too long for the catalog."""
    return bytes((7 * place + number) % 251 for place in range(5000))


def expected(number: int) -> dict[str, Any]:
    """All that a checkpoint of this state holds."""
    return {
        "t.rows": tensor("t.rows", (ROWS, 5), number),
        "t.same": tensor("t.same", (3, 3), number),
        "extra.step": number,
        "extra.long": long(number),
    }


def plain(number: int) -> dict[str, Any]:
    """The state as one process has it."""
    whole = expected(number)
    return {
        "t": {"rows": whole["t.rows"], "same": whole["t.same"]},
        "extra": {"step": number, "long": whole["extra.long"]},
    }


def tensors_of(rank: int, ranks: int, number: int) -> list[tuple[TensorSpec, torch.Tensor]]:
    """What one rank of several holds of the tensors: some rows of one, all of the other."""
    whole, each = expected(number), ROWS // ranks
    mine = whole["t.rows"][rank * each : (rank + 1) * each].clone()
    rows = box_piece((rank * each, 0), (each, 5), 0, (5, 1))
    same = box_piece((0, 0), (3, 3), 0, row_major_strides((3, 3)))
    return [
        (TensorSpec("t.rows", "F32", (ROWS, 5), (rows,), Replication.DECLARED), mine),
        (TensorSpec("t.same", "F32", (3, 3), (same,), Replication.DECLARED), whole["t.same"]),
    ]


def values_of_rank(number: int) -> list[ValueSpec]:
    out = []
    for name in ("extra.step", "extra.long"):
        path = encode_path(name.split("."))
        out.append(ValueSpec(name, path, ValueKind.PLAIN, encode_value(expected(number)[name], name)))
    return out


def is_state(found: dict[str, Any], number: int) -> bool:
    """Whether what was read is this state, bit for bit."""
    wanted = expected(number)
    if found.keys() != wanted.keys():
        return False
    same = [
        torch.equal(v.view(torch.uint8), found[k].view(torch.uint8)) if torch.is_tensor(v) else v == found[k]
        for k, v in wanted.items()
    ]
    return all(same)


def held(path: str | os.PathLike[str]) -> int | None:
    """The number of the one state that the path holds, None where there is no checkpoint; all else is an error."""
    try:
        found = checkpoint.read(path)
    except CheckpointNotFound:
        return None
    report = checkpoint.verify(path)
    assert report.ok, report.problems
    (number,) = [number for number in (OLD, NEW, NEXT) if is_state(found, number)]
    return number


def assert_clean(path: Path) -> None:
    """There is the checkpoint, with the timeline of its save, and nothing else."""
    catalog = checkpoint.catalog(path)
    wanted = {"catalog.msgpack", catalog.save_id, *(key for f in catalog.files for key in (f.key, f.digests_key))}
    found = {str(p.relative_to(path)) for p in path.rglob("*")} - {f"{catalog.save_id}/timeline.msgpack"}
    assert found == wanted, found ^ wanted


def contents(path: Path) -> dict[str, bytes | None]:
    """Every file below a path with its bytes, and every folder."""
    return {str(p.relative_to(path)): None if p.is_dir() else p.read_bytes() for p in path.rglob("*")}


def assert_next_save_works(path: Path, number: int = NEXT) -> dict[str, bytes | None]:
    """Save once more, check that this save works and cleans up what was left, and return the checkpoint that is there then."""
    checkpoint.save(path, plain(number))
    assert held(path) == number
    assert_clean(path)
    return contents(path)
