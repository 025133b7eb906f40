"""Loads: open a catalog, read exact overlaps, verify, place."""
