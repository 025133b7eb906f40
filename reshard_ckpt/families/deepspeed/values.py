"""Converting DeepSpeed's values and the user's from a pickle: tensors are separated, and some objects become dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import UnsupportedError
from ...torchfile.pickle_reader import Opaque, StandInClass, StandInFunction, StandInObject
from ...torchfile.tensors import PickledTensor

ROOT = "deepspeed"
"""The first key of the names of values."""

MAX_DEPTH = 64

NOT_VALUES = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "universal_checkpoint_info",
})  # fmt: skip
"""Keys of model states that describe tensors; all other keys are values, of DeepSpeed or of ``client_state``."""

Path = tuple[Any, ...]


def leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield tensors and values with their paths. Dicts are taken apart, and so are lists that hold tensors.

    A step into a list is a tuple of the index. For an unreadable value, its `UnsupportedError` is yielded instead.
    """
    # An object of DeepSpeed counts as the dict of its attributes.
    if isinstance(value, StandInObject) and isinstance(value.state, dict):
        value = value.state
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value) and len(path) < MAX_DEPTH:
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, list | tuple) and len(path) < MAX_DEPTH and any(isinstance(child, PickledTensor) for child in value):
        for i, child in enumerate(value):
            yield from leaves(child, (*path, (i,)))
    elif isinstance(value, PickledTensor):
        yield path, value
    else:
        try:
            yield path, plain(value)
        except UnsupportedError as error:
            yield path, error


def plain(value: Any, depth: int = 0) -> Any:
    """Convert a value to plain values; an object of DeepSpeed becomes a dict.

    Raises
    ------
    UnsupportedError
        The value holds an object whose class would have to be imported.
    """
    if depth > MAX_DEPTH:
        raise UnsupportedError("is nested too deep; save it in another form")
    if isinstance(value, dict):
        return {plain(key, depth + 1): plain(child, depth + 1) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(child, depth + 1) for child in value)
    if isinstance(value, StandInObject) and isinstance(value.state, dict):
        return plain(value.state, depth + 1)
    if isinstance(value, PickledTensor):
        raise UnsupportedError("has a tensor deep inside of something else; save it at a key of its own")
    if isinstance(value, Opaque | StandInObject | StandInClass | StandInFunction):
        name = value.name if not isinstance(value, StandInObject) else value.kind.name
        raise UnsupportedError(
            f"needs {name}, which could run any code; nothing was executed. Leave it out, or load it with DeepSpeed and save it "
            "again as a plain value"
        )
    return value
