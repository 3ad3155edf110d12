"""The golden check: an engine's numbers, layer by layer, against float32; its tensors against another engine's."""
