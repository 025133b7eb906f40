"""Ray Train: reporting checkpoints to it that the workers save through this library."""
