"""Geometry of shards: boxes and runs, overlaps, tiling of a tensor, order, and dtypes."""
