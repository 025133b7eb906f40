"""Saves: agree on a plan, stage (copy) the state if training goes on, write files, and commit by publishing a catalog."""
