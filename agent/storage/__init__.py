"""Checkpoints in remote storage: read by ranges of HTTP(S) into memory, and filled into engines as from a disk."""
