"""The catalog of a checkpoint: its columns, and functions of these alone, such as selections, summaries, names and links."""
