"""Offline resharding: the save that another topology would have made, written from a catalog."""
