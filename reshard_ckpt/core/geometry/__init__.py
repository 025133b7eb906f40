"""Geometry of shards: boxes and runs, their overlaps, proof that they tile a tensor, and sorted tables of numpy columns."""
