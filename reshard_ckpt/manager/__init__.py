"""The manager of a run: its checkpoints are named by step, pruned, and found again after a crash."""
