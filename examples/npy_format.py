"""A format of another library: a folder of .npy files, each a block of a tensor, and an index.json that says which.

    {"step": 7, "tensors": {"w": {"shape": [4, 2], "blocks": [{"file": "w.0.npy", "offsets": [0, 0]}, …]}}}

Register it as an entry point of your package, and every call and command of reshard_ckpt opens such folders:

    [project.entry-points."reshard_ckpt.formats"]
    npy = "examples.npy_format:FORMAT"
"""

from __future__ import annotations

import io
import json

import numpy as np

from reshard_ckpt.plugins import CatalogBuilder, Format, Source, Storage, read_range
from reshard_ckpt.plugins.errors import CorruptError

INDEX = "index.json"
HEADER_BYTES = 4096
DTYPES = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32", "|u1": "U8", "|b1": "BOOL"}


def open_npy(storage: Storage, key: str | None) -> Source | None:
    """Open a folder for reading; return None if it is no folder of this format."""
    if key is not None or storage.size(INDEX) is None:
        return None
    builder = CatalogBuilder("npy", storage.url)
    try:
        index = json.loads(bytes(storage.read(INDEX, limit=1 << 20)))
        for name, tensor in index["tensors"].items():
            add_tensor(builder, storage, f"model.{name}", tensor)
        builder.value(("extra", "step"), int(index["step"]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{storage.url}: {INDEX} is damaged ({error!r:.200}); use another checkpoint") from error
    return Source(storage, builder.finish(), "npy")


def add_tensor(builder: CatalogBuilder, storage: Storage, name: str, tensor: dict) -> None:
    heads = [read_head(storage, block["file"]) for block in tensor["blocks"]]
    builder.tensor(name, heads[0][0], tuple(tensor["shape"]))
    for block, (_, lengths, offset, size) in zip(tensor["blocks"], heads, strict=True):
        file = builder.file(block["file"], size)
        builder.piece(name, offsets=tuple(block["offsets"]), lengths=lengths, file=file, offset=offset)


def read_head(storage: Storage, key: str) -> tuple[str, tuple[int, ...], int, int]:
    """Return the dtype and the shape of an .npy file, the byte at which its elements begin, and its size."""
    size = storage.size(key)
    if size is None:
        raise CorruptError(f"{storage.url}: {key} is missing, though {INDEX} names it; copy it, or use another checkpoint")
    file = io.BytesIO(bytes(read_range(storage, key, 0, min(size, HEADER_BYTES))))
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read_header(file)
    if fortran_order or dtype.str not in DTYPES:
        raise ValueError(f"{key}: an array of {dtype.str} in order {'F' if fortran_order else 'C'} is not supported")
    return DTYPES[dtype.str], shape, file.tell(), size


FORMAT = Format("npy", "a folder of .npy files with an index.json", open_npy)
