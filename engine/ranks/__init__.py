"""Which devices a Trainer uses, and who starts its ranks."""
