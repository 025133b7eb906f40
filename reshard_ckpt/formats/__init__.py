"""Checkpoints of other libraries: each format gives a catalog over its own files, and some are written, too."""
