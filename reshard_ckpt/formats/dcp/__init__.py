"""Folders of ``torch.distributed.checkpoint``: read in place, and written."""
