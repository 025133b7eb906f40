"""What saves, loads and reshards all use: memory, progress, logs, timings."""
