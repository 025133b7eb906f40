"""The checkpoints of one run: named by step, pruned, and found again after a crash."""
