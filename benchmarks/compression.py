"""How far lossless compression shrinks tensors of a training job: a measurement for a decision, the library itself has none.

``python -m benchmarks.compression --steps 300 --json bench_out/compression.json``

1. Train a small transformer on synthetic text by AdamW, with bf16 weights and fp32 moments.
2. For its weights, moments and int8 weights, and for each way below: compress each block of 128 KiB by itself, as a file with
   verified blocks needs it, and decompress it.

The ways: ``zstd`` by blocks as they are; ``grouped``: the bytes of a block sorted by their place in the element, exponents apart
from mantissas, then zstd. ``copy`` is a copy of the same bytes, for comparison. It needs the package ``zstandard``. Rates are per
CPU second of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

BLOCK_BYTES = 128 << 10
LEVEL = 1


class Reader(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(layers)]
        self.layers, self.head = nn.ModuleList(layer), nn.Linear(width, words)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(text)
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], dtype=hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return self.head(hidden)


def trained(steps: int, width: int) -> tuple[dict[str, torch.Tensor], float]:
    """Train, and return the tensors of each kind end to end, and the last loss."""
    torch.manual_seed(0)
    words = 256
    model = Reader(words, width, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chain = torch.randn(words, words).mul(3).softmax(1)  # which character follows which
    loss = torch.zeros(())
    for _ in range(steps):
        text = torch.zeros(8, 64, dtype=torch.long)
        text[:, 0] = torch.randint(0, words, (8,))
        for at in range(1, 64):
            text[:, at] = torch.multinomial(chain[text[:, at - 1]], 1).flatten()
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    state = [optimizer.state[p] for p in model.parameters()]
    scale = weights.abs().max() / 127
    return {
        "bf16 weights": weights.bfloat16(),
        "fp32 weights": weights,
        "fp32 exp_avg": torch.cat([s["exp_avg"].flatten() for s in state]),
        "fp32 exp_avg_sq": torch.cat([s["exp_avg_sq"].flatten() for s in state]),
        "int8 weights": (weights / scale).round().to(torch.int8),
    }, float(loss)


def ways(item_bytes: int) -> dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], Any]]]:
    """The functions that compress and decompress one block."""
    import zstandard

    pack, unpack = zstandard.ZstdCompressor(level=LEVEL).compress, zstandard.ZstdDecompressor().decompress

    def group(block: bytes) -> bytes:
        return pack(np.ascontiguousarray(np.frombuffer(block, np.uint8).reshape(-1, item_bytes).T).data)

    def ungroup(data: bytes) -> Any:
        return np.ascontiguousarray(np.frombuffer(unpack(data), np.uint8).reshape(item_bytes, -1).T)

    return {"copy": (bytes, bytearray), "zstd": (pack, unpack), "grouped": (group, ungroup)}


def measured(tensor: torch.Tensor) -> dict[str, dict[str, float]]:
    data = tensor.view(torch.uint8).numpy().tobytes()
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data) // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES)]
    total = len(blocks) * BLOCK_BYTES
    found = {}
    for name, (pack, unpack) in ways(tensor.element_size()).items():
        best = {"pack": float("inf"), "unpack": float("inf")}
        for _ in range(3):
            began = time.process_time()
            packed = [pack(block) for block in blocks]
            middle = time.process_time()
            whole = [bytes(unpack(block)) for block in packed]
            ended = time.process_time()
            best = {"pack": min(best["pack"], middle - began), "unpack": min(best["unpack"], ended - middle)}
        assert whole == blocks
        size = sum(map(len, packed))
        found[name] = {
            "ratio": size / total,
            "pack_gb_s": total / best["pack"] / 1e9,
            "unpack_gb_s": total / best["unpack"] / 1e9,
            # On a store of 1 GB/s: reading and unpacking one after the other, and side by side.
            "load_gb_s_one_by_one": 1 / (size / total + best["unpack"] / total * 1e9),
            "load_gb_s_at_once": min(total / size, total / best["unpack"] / 1e9),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tensors, loss = trained(arguments.steps, arguments.width)
    figures = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread",
        "loss": loss,
        "bytes": {name: tensor.nbytes for name, tensor in tensors.items()},
        "zstd_level": LEVEL,
        "measured": {name: measured(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
