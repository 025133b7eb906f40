"""The memory tier: keep checkpoints in the memory (tmpfs) of nodes, as images of the files that they would have on disk."""
