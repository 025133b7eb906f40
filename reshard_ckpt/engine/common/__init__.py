"""Parts that saves, loads and reshards share: host memory, bytes of tensors, progress, logs, timings, step folders."""
