"""Checks of saved checkpoints without a load: verify checksums, compare two, compute statistics, check a manifest."""
