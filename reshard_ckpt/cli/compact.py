"""``reshard-ckpt compact``: make a checkpoint self-contained."""

from __future__ import annotations

from ..engine.common.progress import size_text
from .app import command, print_json, print_text, together
from .formatting import plural
from .options import AsJson, Path, TimeoutS, Workers


@command("reshard-ckpt compact ckpt/step_100")
def compact(path: Path, workers: Workers = None, timeout_s: TimeoutS = 3600.0, as_json: AsJson = False) -> int:
    """Copy the files of other checkpoints that this one refers to into its own folder, so that the others may go.

    Under torchrun all processes share the work.
    """
    from ..checkpoint import compact as compact_checkpoint

    with together(timeout_s) as shared:
        report = compact_checkpoint(path, workers=workers, **shared)
    if as_json:
        print_json(report)
    elif not report.num_files:
        print_text(f"{path}: is self-contained already")
    else:
        what = f"{plural(report.num_files, 'file')} of {', '.join(report.checkpoints)} copied, {size_text(report.num_bytes)}"
        print_text(f"{path}: self-contained now ({what})")
    return 0
