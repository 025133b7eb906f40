"""Finding the files of a model in a folder that Hugging Face's libraries wrote: the files in its index, else all of one kind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.catalog.model import Catalog
from ..engine.loading.scales import ENTRIES
from ..errors import CorruptError, UsageError
from ..format.columns import TORCH_NAMES
from ..format.shard_file import unique
from ..storage import Storage
from ..storage.posix import broken_link
from ..storage.protocol import copy_file, key_parts, write_file

CONFIG = "config.json"
INDEX = ".index.json"
MAX_INDEX_BYTES = 256 << 20
"""The largest index file in bytes that is read; it lists over a million tensors."""


class WeightFiles(NamedTuple):
    """The weight files of a model.

    Attributes
    ----------
    names
        Maps the key of each file to the names of the tensors to read from it; None stands for all of its tensors.
    metadata
        The texts in the metadata of the index. huggingface_hub maps the other names of tied tensors there to their names.
    """

    names: Mapping[str, frozenset[str] | None]
    metadata: Mapping[str, str] = MappingProxyType({})


SIDE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of small files beside a model that a conversion copies along: its config and its tokenizer."""

MAX_SIDE_BYTES = 256 << 20
"""The size above which a file beside a model is not copied: it is data of another kind."""

POINTER = b"version https://"
"""The first bytes of the text that git leaves in place of a large file where Git LFS is missing."""

_SHARD = re.compile(r"shard-[0-9]{5,9}-.*")
_PART = re.compile(r"(?P<stem>.*)-(?P<part>[0-9]{1,9})-of-(?P<parts>[0-9]{1,9})")


def weight_files(storage: Storage, suffix: str, *, main: str, others: bool = True) -> WeightFiles | None:
    """List the weight files in a folder; return None if there are none.

    Parameters
    ----------
    suffix
        The ending of files of this kind.
    main
        The name that a single file of the model has; an index with this name comes before others.
    others
        Whether to list files of all names if there is no index. If False, list only `main`, or else only numbered parts, or
        else all: a trainer leaves other things in files of this ending.
    """
    keys = top_level(storage)
    indices = [key for key in keys if key.endswith(suffix + INDEX)]
    if len(indices) > 1 and main + INDEX not in indices:
        raise UsageError(f"{storage.url}: has several indices ({', '.join(indices)}); keep those of one model in the folder")
    if indices:
        index = main + INDEX if main + INDEX in indices else indices[0]
        found, single = read_index(storage, index), index.removesuffix(INDEX)
        # A later save of one file has replaced the files of the index. These may also lie in folders.
        if single in keys and found.names.keys().isdisjoint(key for key, _ in storage.list()):
            return WeightFiles({single: None})
        if main in keys and main not in found.names:  # transformers would load that file, and pass over the index
            raise UsageError(
                f"{storage.url}: has {main} and {index}, which does not name it; keep those of one model in the folder"
            )
        _refuse_broken_links(storage, found.names.__contains__)
        return found
    files = [key for key in keys if key.endswith(suffix)]
    if not others:
        files = [main] if main in files else [key for key in files if _PART.fullmatch(key.removesuffix(suffix))] or files
    elif files:  # without any, the folder may hold a model in files of another kind
        _refuse_broken_links(storage, lambda name: name.endswith(suffix) and not name.startswith("."))
    _check_parts(storage, files, suffix)
    return WeightFiles(dict.fromkeys(files)) if files else None


def _refuse_broken_links(storage: Storage, counts: Callable[[str], bool]) -> None:
    """Raise `CorruptError` if a link in the folder is broken whose name counts as that of a weight file."""
    if link := broken_link(storage.url, counts):
        raise CorruptError(link)


def is_shard(key: str) -> bool:
    """Return whether a file holds the part of one rank, by the name that torch's writer gives it.

    >>> is_shard("shard-00002-model-00001-of-00001.safetensors"), is_shard("model-00001-of-00002.safetensors")
    (True, False)
    """
    return _SHARD.fullmatch(key) is not None


def top_level(storage: Storage) -> list[str]:
    """List the files directly in a folder, without hidden ones: macOS leaves ``._model.safetensors`` beside each file."""
    return [key for key, _ in storage.list() if "/" not in key and not key.startswith(".")]


def refuse_pointer(head: bytes | memoryview, where: str) -> None:
    """Refuse a pointer of Git LFS; `head` has the first bytes of the file, as many as `POINTER` or more."""
    if head[: len(POINTER)] == POINTER:
        raise CorruptError(f"{where}: is a pointer of Git LFS, not the file itself; git lfs pull fetches it")


def _check_parts(storage: Storage, files: Sequence[str], suffix: str) -> None:
    """Check that all numbered parts are there: without an index, only the files' names show that one is missing."""
    present = set(files)
    matches = list(filter(None, (_PART.fullmatch(file.removesuffix(suffix)) for file in files)))
    # Of files of ranks only the numbers of parts are compared: torch leaves out a file to which a rank has nothing to add.
    of_ranks = {match["parts"]: match[0] for match in matches if is_shard(match[0])}
    if len(of_ranks) > 1:
        first, second, *_ = of_ranks.values()
        raise CorruptError(
            f"{storage.url}: {first}{suffix} and {second}{suffix} are of two saves; keep the files of one in the folder"
        )
    for match in {(match["stem"], match["parts"]): match for match in matches if not is_shard(match[0])}.values():
        digits, num = len(match["part"]), int(match["parts"])
        for part in range(1, min(num, len(files) + 1) + 1):
            key = f"{match['stem']}-{part:0{digits}d}-of-{match['parts']}{suffix}"
            if key not in present:
                missing = f"{storage.url}: has {match[0]}{suffix}, but neither {key} nor an index"
                raise CorruptError(f"{missing}; copy the rest of it, or open one file by itself")


def read_index(storage: Storage, key: str) -> WeightFiles:
    """Read the index of a Hugging Face folder: the files that it names, with the names of the tensors in each."""
    where = f"{storage.url}: {key}"
    try:
        index: Any = json.loads(storage.read(key, limit=MAX_INDEX_BYTES).decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CorruptError(f"{where}: is not JSON ({error}); use another copy of it") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CorruptError(f"{where}: has no weight_map of names to files; use another copy of it")
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, set()).add(name)
    for file in by_file:
        key_parts(file)  # raises if a hostile index names a file outside of its folder
    metadata = index.get("metadata")
    texts = {name: text for name, text in metadata.items() if isinstance(text, str)} if isinstance(metadata, dict) else {}
    return WeightFiles({file: frozenset(by_file[file]) for file in sorted(by_file)}, texts)


def copy_side_files(
    source: Storage, catalog: Catalog, target: Storage, *, dequantized: bool = False, dtypes: Mapping[str, str] | None = None
) -> None:
    """Copy a model's config and tokenizer: the files directly in a foreign checkpoint's folder that end in `SIDE_SUFFIXES`.

    Nothing is copied from a folder without ``config.json``, nor from one of this library's own checkpoints.

    Parameters
    ----------
    dequantized
        Leave the entries about quantization out of ``config.json``.
    dtypes
        Maps saved dtypes to the dtypes that they were cast to, both by torch's names; ``""`` stands for all other saved dtypes.
    """
    own = {file.key for file in catalog.files}
    # Only this library's own checkpoints have digests.
    if any(file.digests_key for file in catalog.files) or CONFIG not in (keys := top_level(source)):
        return
    for key in keys:
        size = source.size(key)
        if key in own or not key.endswith(SIDE_SUFFIXES) or ".index." in key or size is None or size > MAX_SIDE_BYTES:
            continue
        changed = None
        if key == CONFIG and (dequantized or dtypes):
            changed = _changed(source.read(key, MAX_SIDE_BYTES), ENTRIES if dequantized else (), dtypes or {})
        if changed:
            write_file(target, key, changed)
        else:
            copy_file(source, key, target)


def _changed(data: bytes, left_out: Collection[str], dtypes: Mapping[str, str]) -> bytes | None:
    """Return a ``config.json`` without some entries and with other dtypes; None if nothing changes, or for no JSON object."""

    def cast(value: Any) -> Any:
        if isinstance(value, dict):  # the dtype of each part of the model
            return {part: cast(each) for part, each in value.items()}
        return dtypes.get(value, dtypes.get("", value)) if value in TORCH_NAMES.values() else value

    def changed(config: dict[str, Any]) -> dict[str, Any]:
        """Change the entries of a model's config, and of the configs of its parts. An entry such as a vocabulary stays."""
        new = dict(config)
        for key, value in config.items():
            if key in ("torch_dtype", "dtype"):
                new[key] = cast(value)
            elif key.endswith("_config") and key not in ENTRIES and isinstance(value, dict):
                new[key] = changed(value)
        return new

    try:
        found = json.loads(data)
        if not isinstance(found, dict):
            return None
        config = {key: value for key, value in changed(found).items() if key not in left_out}
    except (ValueError, RecursionError):
        return None
    return None if config == found else (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
