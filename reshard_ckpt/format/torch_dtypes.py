"""The torch dtypes of the element types of the format."""

from __future__ import annotations

import torch

from ..core.catalog.specs import CODES
from ..errors import UnsupportedError

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The torch dtype of each code of `core.catalog.specs`."""

_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}
assert set(TORCH_DTYPES) == set(CODES)

_ADVICE = {
    torch.complex128: "save torch.view_as_real(tensor), which is float64",
    torch.complex32: "save torch.view_as_real(tensor), which is float16",
}


def dtype_code(dtype: torch.dtype, name: str) -> str:
    """Return the format's code of a torch dtype; `name` is the tensor's name in the message.

    >>> dtype_code(torch.bfloat16, "model.w")
    'BF16'

    Raises
    ------
    UnsupportedError
        The format has no such element type.
    """
    code = _CODES.get(dtype)
    if code is None:
        advice = _ADVICE.get(dtype, "save tensor.view(torch.uint8) and view it back after loading, or convert it")
        raise UnsupportedError(f"{name}: dtype {dtype} cannot be stored; {advice}")
    return code
