"""How does a checkpoint of any format become a folder of ``torch.distributed.checkpoint``? Read as a stream, written as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..adapters.dcp import Span, write_dcp
from ..engine.progress import OnProgress, reporter
from ..engine.saved_values import open_values
from ..engine.stream import Run, stream
from ..storage import open_storage
from .choosing import refuse_unreadable
from .source import Path, Source


def write_dcp_folder(
    source: Source, path: Path, *, optimizer: str = "nested", verify: bool = True, progress: bool | OnProgress = False
) -> None:
    """Write what a source holds as a folder that ``torch.distributed.checkpoint.load`` accepts.

    Memory is bounded, whatever the size; a value of each rank's own becomes the list of all ranks' values.

    Parameters
    ----------
    source
        The checkpoint.
    path
        The folder, empty or not there yet.
    optimizer
        The form of optimizers' groups: ``"nested"`` as ``get_optimizer_state_dict`` returns them, ``"flat"`` as it does with
        ``flatten_optimizer_state_dict=True``.
    verify
        Prove the checksum of every block that is read.
    progress
        As for `load`.

    Raises
    ------
    UsageError
        The folder is not empty.
    UnsupportedError
        The source has something that cannot be read.
    """
    storage, saved = source.storage, source.catalog
    refuse_unreadable(saved, None)
    names = saved.value_names
    values = {
        name: list(value.value) if value.kind.name == "PER_RANK" else value.value
        for name, value in open_values(storage, saved, names, verify=verify).items()
    }
    report, total = reporter(progress), 0

    def bytes_of(spans: Sequence[Span]) -> Iterator[memoryview]:
        runs = [Run(s.tensor, (0,) * len(saved.shape(s.tensor)), saved.shape(s.tensor), s.start, s.count) for s in spans]
        done = 0
        for part in stream(storage, saved, runs, verify=verify):
            yield part
            done += len(part)
            report("write", done, total)

    total = sum(tensor.num_bytes for tensor in saved.tensors() if tensor.alias_of is None)
    with open_storage(path) as folder:
        write_dcp(folder, saved, values, bytes_of, optimizer=optimizer)
