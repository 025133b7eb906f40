"""Checkpoints of Megatron-Core: read as they are, and written."""
