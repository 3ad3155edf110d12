"""The stages of an instance's life, one small file each; agent/transitions.py runs them."""
