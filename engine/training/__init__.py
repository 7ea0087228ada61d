"""The loop, and what stands around it."""
