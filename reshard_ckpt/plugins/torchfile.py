"""Files of ``torch.save``, read and written without running any code in them."""

from __future__ import annotations

from ..format.objects import Named
from ..torchfile.archive import FileReader, FileTensor, TorchFile, read_object
from ..torchfile.object_writer import object_bytes
from ..torchfile.pickle_reader import attributes_of, class_of
from ..torchfile.tensors import PickledTensor

__all__ = [
    "FileReader",
    "FileTensor",
    "Named",
    "PickledTensor",
    "TorchFile",
    "attributes_of",
    "class_of",
    "object_bytes",
    "read_object",
]
