"""A training job whose tmpfs is too small: it goes on, and each save is somewhere. A script, as the tmpfs is its own."""

from __future__ import annotations

import json
import sys
import warnings

import torch

from reshard_ckpt.checkpoint import Manager, Memory

NUM = 5 << 20
"""Numbers of four bytes: 20 MiB, of which a tmpfs of 64 MB holds two and not three."""


def main(root: str, folder: str) -> None:
    weights = torch.zeros(NUM, dtype=torch.int32)
    tiers = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Manager(root, memory=Memory(copies=0, folder=folder), persist_every="1h") as manager:
            for step in range(1, 7):
                weights.copy_(torch.arange(NUM, dtype=torch.int32) + step)
                handle = manager.async_save(step, {"w": weights})
                handle.staged()
                weights.fill_(-1)  # training goes on
                handle.result()
                found = manager.load_latest({"w": weights})
                assert found is not None
                assert found.step == step
                assert torch.equal(weights, torch.arange(NUM, dtype=torch.int32) + step)
                tiers.append(found.tier)
            skipped = manager.memory_skipped
    print(json.dumps({"tiers": tiers, "skipped": skipped, "warnings": [str(one.message) for one in caught]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
