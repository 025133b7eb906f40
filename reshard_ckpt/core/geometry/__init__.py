"""Runs of boxes: what shards share, whether they tile a tensor, in which order they come."""
