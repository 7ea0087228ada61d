"""What a user writes, and what the engine reads of it."""
