"""Checks of checkpoints that load nothing: verify, compare, statistics, manifest."""
