"""``reshard-ckpt verify``: compare every byte of a checkpoint with its checksum."""

from __future__ import annotations

from typing import Annotated

import typer

from ..engine.common.progress import size_text
from .app import PROBLEM, as_plain, command, print_json, print_note, print_text, together
from .formatting import plural
from .options import AsJson, Path, TimeoutS, Workers


@command("reshard-ckpt verify ckpt/step_100")
def verify(
    path: Path,
    sha256: Annotated[bool, typer.Option("--sha256", help="Also compare every file with the SHA-256 manifest.")] = False,
    workers: Workers = None,
    timeout_s: TimeoutS = 3600.0,
    as_json: AsJson = False,
) -> int:
    """Read a whole checkpoint and verify every byte of it. The exit code is 1 if anything is wrong.

    Under torchrun all processes share the work.
    """
    from ..checkpoint import verify as verify_checkpoint

    with together(timeout_s) as shared:
        report = verify_checkpoint(path, sha256=sha256, workers=workers, **shared)
    if as_json:
        print_json({"ok": report.ok, **as_plain(report)})
    else:
        read = f"{plural(report.num_files, 'file')}, {size_text(report.num_bytes)}"
        fine = "every byte is as it was written"
        if report.bytes_unverified:
            fine = "all files are there, whole; their bytes cannot be verified, as this format has no checksums"
        print_text(*report.problems, f"{path}: {fine if report.ok else 'DAMAGED'} ({read})")
    if not report.ok:
        print_note("load another checkpoint, or restore the files that are named")
        return PROBLEM
    return 0
