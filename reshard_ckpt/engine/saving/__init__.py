"""Saves: agree, stage, write, commit."""
