"""ByteCheckpoint: its folders, read as they are."""
