"""Converting DeepSpeed's values and the user's from a pickle: tensors are separated, and some objects become dicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...plugins.errors import UnsupportedError
from ...plugins.torchfile import PickledTensor, attributes_of, class_of
from ...plugins.trees import flatten

MAX_DEPTH = 64

_LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler"
CLASSES = {
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): False,
    (_LOSS_SCALER, "LossScaler"): True,
    (_LOSS_SCALER, "DynamicLossScaler"): True,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): True,
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): True,
}
"""DeepSpeed's classes in its files; see `plugins.torchfile.FileReader`."""

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
    for at, leaf in flatten(value, _children, path, max_depth=MAX_DEPTH):
        try:
            yield at, leaf if isinstance(leaf, PickledTensor) else plain(leaf)
        except UnsupportedError as error:
            yield at, error


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    node = _without_class(node)
    if isinstance(node, Mapping) and node and all(isinstance(key, str) for key in node):
        return node.items()
    if isinstance(node, list | tuple) and any(isinstance(child, PickledTensor) for child in node):
        return (((i,), child) for i, child in enumerate(node))
    return None


def _without_class(value: Any) -> Any:
    """Return the attributes of an object of DeepSpeed as a dict; any other value as it is."""
    attributes = attributes_of(value)
    return value if attributes is None else attributes


def plain(value: Any, depth: int = 0) -> Any:
    """Convert a value to plain values; an object of DeepSpeed becomes a dict.

    Raises
    ------
    UnsupportedError
        The value holds an object whose class would have to be imported.
    """
    if depth > MAX_DEPTH:
        raise UnsupportedError("is nested too deep; save it in another form")
    value = _without_class(value)
    if isinstance(value, dict):
        return {plain(key, depth + 1): plain(child, depth + 1) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(child, depth + 1) for child in value)
    if isinstance(value, PickledTensor):
        raise UnsupportedError("has a tensor deep inside of something else; save it at a key of its own")
    if (needed := class_of(value)) is not None:
        raise UnsupportedError(
            f"needs {needed}, which could run any code; nothing was executed. Leave it out, or load it with DeepSpeed and save "
            "it again as a plain value"
        )
    return value
