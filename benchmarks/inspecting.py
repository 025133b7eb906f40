"""The time to inspect the catalog of a million shards: opening, summary and tree, then the text of it.

``python -m benchmarks.inspecting``; imports are not counted. The limit printed beside it is one reading of the same bytes.
"""

from __future__ import annotations

import importlib
import platform
import tempfile
from pathlib import Path

import numpy as np

from reshard_ckpt import checkpoint
from reshard_ckpt.format.catalog import encode_catalog

from .catalog_codec import CASES, fastest_s, state


def main() -> None:
    command = importlib.import_module("reshard_ckpt.cli.inspect")
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"{'tensors':>8} {'ranks':>6} {'cut':>5} {'shards':>8} {'inspect s':>9} {'text s':>7} {'read s':>7}")
    for num_tensors, num_ranks, flat in CASES:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "catalog.msgpack")
            file.write_bytes(encode_catalog(state(num_tensors, num_ranks, flat=flat)))
            inspect_s, read_s = fastest_s(lambda folder=folder: checkpoint.inspect(folder)), fastest_s(file.read_bytes)
            found = checkpoint.inspect(folder)
        text_s = fastest_s(lambda found=found: [part.text() for paragraph in command.paragraphs(found) for part in paragraph])
        cut, shards = "flat" if flat else "dim 0", found.summary.num_shards
        print(f"{num_tensors:8} {num_ranks:6} {cut:>5} {shards:8} {inspect_s:9.3f} {text_s:7.3f} {read_s:7.4f}")


if __name__ == "__main__":
    main()
