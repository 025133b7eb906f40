"""Checkpoints of other libraries: each format builds a catalog over its own files, and `convert` writes some of them."""
