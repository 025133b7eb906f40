"""The files that this process has open below a folder: not those of other tests, which the collector of garbage may close now."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """Return the path of each open file and folder there, once for each descriptor."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in found if path.startswith(f"{folder.resolve()}"))
