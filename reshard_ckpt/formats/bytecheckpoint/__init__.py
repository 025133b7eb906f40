"""Folders of ByteCheckpoint: read as they are."""
