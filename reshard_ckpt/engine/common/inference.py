"""torch's inference mode: public calls leave it, because tensors that are made in it stay read-only outside.

Otherwise one save in a validation function would leave a staging buffer that no later save can fill, and optimizer state that a
load creates could never be stepped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave the inference mode for a ``with`` block, if this thread is in it; what runs there is still not recorded."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
