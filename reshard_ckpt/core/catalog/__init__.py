"""The catalog of a checkpoint (tensors, values and files, as columns), and functions on names, placements and groups."""
