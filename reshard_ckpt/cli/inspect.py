"""``reshard-ckpt inspect``: what does a checkpoint hold?"""

from __future__ import annotations

from .app import AsJson, Path, command, emit, say


@command("reshard-ckpt inspect ckpt/step_100")
def inspect(path: Path, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds."""
    from ..checkpoint import catalog

    summary = catalog(path).summary()
    if as_json:
        emit(summary)
    else:
        say(*(f"{key}: {value}" for key, value in summary.items()))
