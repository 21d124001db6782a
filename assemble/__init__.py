"""Checkpoint to checkpoint, and checkpoint to knowledge: headers and bytes, no model in memory, no GPU, no torch."""
