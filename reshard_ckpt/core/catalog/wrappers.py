"""Removal of the steps that torch's wrappers add to the names of a module's tensors.

1. ``torch.compile``, activation checkpointing and FSDP1 store the wrapped module under attribute names that nobody else uses.
   These steps are dropped wherever they stand.
2. DDP, ``DataParallel`` and ``AveragedModel`` store it as ``module``, a name that users choose too. In a dict of tensors, the
   only evidence of such a wrapper is that *every* key begins with it, except ``n_averaged``, the counter of an ``AveragedModel``.
   Then the first step is dropped, once. If a tensor was saved under the other of the two names, a load finds it, provided that
   only one saved name fits (`core.planning.match`).
"""

from __future__ import annotations

from collections.abc import Sequence

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The attributes in which torch's wrappers store the wrapped module; nobody else uses these names."""

MODULE = "module"
COUNT = "n_averaged"


def unwrapped(name: str) -> str:
    """Return a name without the steps that only wrappers use.

    >>> unwrapped("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPED) if "._" in f".{name}" else name


def unwrapped_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys of one dict without the steps that wrappers added.

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
    """Return a name without any step that a wrapper may have added.

    >>> bare("ema.module.layers.0._orig_mod.weight")
    'ema.layers.0.weight'
    """
    return ".".join(part for part in unwrapped(name).split(".") if part != MODULE)
