"""The command line without its script: ``python -m reshard_ckpt``; ``torchrun … -m reshard_ckpt`` on ranks."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
