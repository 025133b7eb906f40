"""torchtitan: a checkpoint manager that its Trainer builds in the place of its own."""
