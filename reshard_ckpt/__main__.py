"""The command line as a module: ``python -m reshard_ckpt``, or ``torchrun … -m reshard_ckpt`` on several ranks."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
