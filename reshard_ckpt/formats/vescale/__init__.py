"""Folders of veScale's checkpoints of 2024: read as they are."""
