"""torch's inference mode, which a caller may be in: nothing that outlives a call is made in it.

What is made there cannot be written to outside of it. So one save in a function for validation would leave a staging buffer that
no later save can fill, and state that a load makes for an optimizer could never be stepped.
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
