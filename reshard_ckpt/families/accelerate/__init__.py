"""Accelerate and the ``Trainer`` of transformers: their FSDP checkpoints through this library."""
