"""The memory tier: checkpoints in the memory of this node and of others, as the files that they would be on disk."""
