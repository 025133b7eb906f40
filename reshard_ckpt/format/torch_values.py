"""Encoding and decoding values of torch's types: the part of `values` and `value_decode` that imports torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from ..errors import CorruptError
from .value_decode import decode_each, decode_node, decode_shape, typed, typed_item

TORCH_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
# Without quantized, sub-byte and raw-bits dtypes: a copy of the bytes alone does not copy their elements.
TENSOR_DTYPES = frozenset(
    name for name in TORCH_DTYPES if re.fullmatch(r"bool|u?int(8|16|32|64)|b?float(16|32|64)|float8_e\w+|complex\d+", name)
)

SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""For each layout of sparse tensors, the names of the methods that return the parts of such a tensor."""
_SPARSE_LAYOUTS = {str(layout).removeprefix("torch."): layout for layout in SPARSE_PARTS}


def _decode_size(body: Any, depth: int) -> torch.Size:
    """Decode a `torch.Size`. It need not be the shape of a tensor: a size for `view` may have a -1."""
    sizes = typed_item(body, list)
    if any(type(size) is not int or not -(2**63) <= size < 2**63 for size in sizes):
        raise CorruptError(f"{sizes!r:.80} is not a torch.Size")
    return torch.Size(sizes)


def _decode_tensor(body: Any, depth: int) -> torch.Tensor:
    name, shape, data = typed(body, str, list, bytes)
    if name not in TENSOR_DTYPES:
        raise CorruptError(f"torch dtype {name!r:.80} cannot be loaded into a tensor by this torch")
    dtype = TORCH_DTYPES[name]
    checked = decode_shape(shape, dtype.itemsize, data)
    if dtype is torch.bool and data.strip(b"\0\1"):
        raise CorruptError("a bool is neither 0 nor 1")
    if not data:
        return torch.empty(checked, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(checked)


def _decode_parameter(body: Any, depth: int) -> torch.nn.Parameter:
    requires_grad, node = typed(body, bool, dict)
    tensor = decode_node(node, depth)
    if type(tensor) is not torch.Tensor:
        raise CorruptError("a parameter is not a tensor")
    return torch.nn.Parameter(tensor, requires_grad)


def _decode_sparse(body: Any, depth: int) -> torch.Tensor:
    """Decode a sparse tensor; torch checks that its indices lie in its shape, and raises otherwise."""
    name, shape, nodes = typed(body, str, list, list)
    layout, parts = _SPARSE_LAYOUTS.get(name), decode_each(nodes, depth)
    if layout is None or len(parts) != len(SPARSE_PARTS[layout]) or any(type(part) is not torch.Tensor for part in parts):
        raise CorruptError(f"a sparse tensor of layout {name!r:.80} has not the parts of one")
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(parts[0], parts[1], shape, check_invariants=True)
    return torch.sparse_compressed_tensor(parts[0], parts[1], parts[2], shape, layout=layout, check_invariants=True)


def _decode_torch_dtype(body: Any, depth: int) -> torch.dtype:
    name = typed_item(body, str)
    if name not in TORCH_DTYPES:
        raise CorruptError(f"torch {torch.__version__} has no dtype {name!r:.80}")
    return TORCH_DTYPES[name]


DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "torch.Tensor": _decode_tensor,
    "torch.Parameter": _decode_parameter,
    "torch.sparse": _decode_sparse,
    "torch.dtype": _decode_torch_dtype,
    "torch.Size": _decode_size,
    "torch.device": lambda body, depth: torch.device(typed_item(body, str)),
}
"""For each tag of an encoded torch value, the function that decodes it."""


def _encode_tensor(value: torch.Tensor, place: Any) -> Any:
    if value.layout in SPARSE_PARTS:
        parts = enumerate(getattr(value.detach(), part)() for part in SPARSE_PARTS[value.layout])
        layout = str(value.layout).removeprefix("torch.")
        return {"torch.sparse": [layout, list(value.shape), [_encode_tensor(part, place.child(i)) for i, part in parts]]}
    name = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or value.is_quantized or value.is_meta or name not in TENSOR_DTYPES:
        place.refuse(
            f"a {value.layout} tensor of {value.dtype} on {value.device} cannot be saved in a value; make it dense, with data"
        )
    flat = flat_copy(value)
    if flat.dtype is torch.bool:  # uninitialized memory may have bytes other than 0 and 1, which a reader refuses
        flat = flat.view(torch.uint8) != 0
    return {"torch.Tensor": [name, list(value.shape), flat.view(torch.uint8).numpy().tobytes()]}


def flat_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the elements of a dense tensor into new host memory, in one dim. The copy can be viewed as bytes.

    torch cannot view an empty tensor as bytes, nor one of one element, if its stride is not 1.
    """
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu").copy_(tensor.detach().reshape(-1))


ENCODERS: dict[type, Callable[[Any, Any], Any]] = {
    torch.Tensor: _encode_tensor,
    torch.nn.Parameter: lambda value, place: {"torch.Parameter": [value.requires_grad, _encode_tensor(value, place)]},
    torch.dtype: lambda value, place: {"torch.dtype": str(value).removeprefix("torch.")},
    torch.Size: lambda value, place: {"torch.Size": list(value)},
    torch.device: lambda value, place: {"torch.device": str(value)},
}
"""For each torch type, the function that encodes a value of exactly this type."""
