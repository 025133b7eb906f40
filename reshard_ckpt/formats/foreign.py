"""The foreign formats that can be read, in the order in which they are tried. Each gives a catalog over its own files.

Nothing is converted and no tensor data are read: the catalog has the places of the bytes, and the planner and the reader of the
library's own checkpoints do the rest, resharding included.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from .protocol import ForeignFormat, Source

FORMATS = (
    ForeignFormat(
        "bytecheckpoint", "a folder of ByteCheckpoint, which has model/.metadata of its own classes", ".bytecheckpoint.read"
    ),
    ForeignFormat(
        "vescale",
        "a folder of vescale.checkpoint, which has model/.metadata or optimizer/pp_0/.metadata of its own classes",
        ".vescale.read",
    ),
    ForeignFormat(
        "megatron",
        "a run or an iteration of Megatron-Core, which has latest_checkpointed_iteration.txt, a metadata.json, or mp_rank_00",
        ".megatron.read",
    ),
    ForeignFormat("dcp", "a folder of torch.distributed.checkpoint, which has a .metadata file, or __0.metadata", ".dcp.read"),
    ForeignFormat(
        "deepspeed",
        "a folder of DeepSpeed, which has mp_rank_00_model_states.pt or such, or the file latest that names one",
        ".deepspeed.read",
    ),
    ForeignFormat(
        "safetensors", "a .safetensors file, or a folder with model.safetensors.index.json or .safetensors files", ".safetensors"
    ),
    ForeignFormat("torch", "a file that torch.save wrote, or a folder with pytorch_model.bin or its index", ".torch_file"),
)
"""In the order in which they are tried."""


def with_options(names: Collection[str], **options: bool) -> tuple[ForeignFormat, ...]:
    """Return `FORMATS`, where those of these names open paths with options of their ``open_path``.

    >>> [one.name for one in with_options(["dcp"], as_saved=True) if one.options]
    ['dcp']
    """
    return tuple(replace(one, options=options) if one.name in names else one for one in FORMATS)


def open_foreign(path: str, formats: Sequence[ForeignFormat] = FORMATS) -> Source | None:
    """Open what a path holds in the first format that recognizes it; return None if none does.

    Raises
    ------
    CorruptError
        A format knows it, but it is damaged.
    """
    return next((found for one in formats if (found := one.open(path)) is not None), None)
