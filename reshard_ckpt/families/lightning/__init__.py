"""Lightning: its strategies for the ``Trainer`` and for Fabric, with the checkpoints of this library."""
