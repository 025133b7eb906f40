"""The checkpoints of one run: named by step, pruned, found again."""
