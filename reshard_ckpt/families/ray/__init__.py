"""Ray Train: its reports of checkpoints that this library saves."""
