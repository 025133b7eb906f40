"""Resharding: a saved checkpoint is rewritten for another mesh, and a live state is moved from one layout to another."""
