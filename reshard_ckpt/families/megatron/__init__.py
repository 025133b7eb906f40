"""Megatron-Core: its checkpoints, read and written; its sharded state dicts and optimizers; its calls."""
