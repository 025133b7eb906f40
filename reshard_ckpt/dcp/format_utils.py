"""Replacements of the functions in `torch.distributed.checkpoint.format_utils`, for all formats that this library opens."""

from __future__ import annotations

import zipfile

import torch

from ..checkpoint import convert
from ..errors import UnsupportedError
from ..formats.dcp.chunks import NAME as DCP
from ..formats.dcp.names import MODEL
from ..formats.source import SAFETENSORS, open_source
from .arguments import Path
from .metadata import FORMATS_AS_SAVED
from .saving import save


def dcp_to_torch_save(dcp_checkpoint_dir: Path, torch_save_path: Path) -> None:
    """Write a checkpoint as one file for ``torch.load``, by one process and in bounded memory.

    An optimizer gets the form of ``optimizer.state_dict()``: parameters by number, with their names in ``param_names``. For a
    folder of DCP or Hugging Face that holds only the state dict of a model, the file is that state dict. But if a name in a
    folder of DCP begins with ``model.``, the file has a dict for the first part of each name. A model's tensors that lie at the
    top beside other things come below the key ``model``.

    Parameters
    ----------
    dcp_checkpoint_dir
        A checkpoint of any format that `checkpoint.load` opens.
    torch_save_path
        The file to write; a file there is replaced.
    """
    with open_source(dcp_checkpoint_dir) as source:
        is_model = source.format == SAFETENSORS
        if source.format == DCP:
            with open_source(dcp_checkpoint_dir, FORMATS_AS_SAVED) as as_saved:
                catalogs = source.catalog, as_saved.catalog
            named, saved = ({*each.names, *each.value_names, *each.unreadable} for each in catalogs)
            is_model = bool(saved) and named == {f"{MODEL}.{name}" for name in saved}
    convert(dcp_checkpoint_dir, torch_save_path, to="torch", root=MODEL if is_model else None, overwrite=True)


def torch_save_to_dcp(torch_save_path: Path, dcp_checkpoint_dir: Path) -> None:
    """Write a file of ``torch.save`` as a checkpoint of this library, by one process; `load` loads it into any layout.

    Parameters
    ----------
    torch_save_path
        The file to read.
    dcp_checkpoint_dir
        The folder to write.

    Raises
    ------
    UnsupportedError
        The file holds more than tensors and plain values, or was not written by ``torch.save``.
    """
    try:
        state = torch.load(torch_save_path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(torch_save_path))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch raises pickle's errors, zip's and others, which have no class in common
        raise UnsupportedError(f"{torch_save_path}: is not a file of tensors and plain values alone ({error})") from error
    save(state, checkpoint_id=dcp_checkpoint_dir, no_dist=True)
