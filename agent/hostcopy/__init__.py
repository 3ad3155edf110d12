"""The host tier on one slot: copies of weights in host memory, each in a process of its own (docs/host-tier.md)."""
