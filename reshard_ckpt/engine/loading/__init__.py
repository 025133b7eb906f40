"""Loads: open a catalog, plan exact overlaps of saved and wanted tensors, read and verify them, put them in place."""
