"""The catalog of a checkpoint: its columns, and what follows from them alone."""
