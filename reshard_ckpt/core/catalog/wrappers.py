"""What torch's wrappers put into the names of a module's tensors, and the names without it.

1. ``torch.compile``, activation checkpointing and FSDP1 call the module inside by names that nobody else uses. They are dropped
   wherever they stand.
2. DDP, ``DataParallel`` and ``AveragedModel`` call it ``module``, which a user may do as well. In a dict of tensors, the only
   evidence is that *every* key begins so, except ``n_averaged``, the count of an ``AveragedModel``; then the first step is
   dropped, once. A load finds a tensor that was saved under the other of the two names, if it can mean just one:
   `core.planning.match`.
"""

from __future__ import annotations

from collections.abc import Sequence

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What torch's wrappers call the module inside; nobody else uses these names."""

MODULE = "module"
COUNT = "n_averaged"


def unwrapped(name: str) -> str:
    """A name without the steps that only wrappers have.

    >>> unwrapped("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPED) if "._" in f".{name}" else name


def unwrapped_keys(keys: Sequence[str]) -> list[str]:
    """The keys of one dict without what wrappers put into them.

    >>> unwrapped_keys(["module._orig_mod.0.weight", "module._orig_mod.0.bias", "n_averaged"])
    ['0.weight', '0.bias', 'n_averaged']
    >>> unwrapped_keys(["module.weight", "head.weight"])
    ['module.weight', 'head.weight']
    """
    clean = [unwrapped(key) for key in keys]
    rest = [key for key in clean if key != COUNT]
    if rest and all(key.startswith(f"{MODULE}.") for key in rest):
        return [key.removeprefix(f"{MODULE}.") for key in clean]
    return clean


def bare(name: str) -> str:
    """A name without any step that a wrapper may have put into it.

    >>> bare("ema.module.layers.0._orig_mod.weight")
    'ema.layers.0.weight'
    """
    return ".".join(part for part in unwrapped(name).split(".") if part != MODULE)
