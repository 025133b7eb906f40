"""Resharding: rewrite a saved checkpoint for another mesh, or move a live state from one layout to another."""
