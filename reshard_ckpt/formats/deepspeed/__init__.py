"""Folders that DeepSpeed wrote: its engine's checkpoints and its universal ones, opened in place, without DeepSpeed."""
