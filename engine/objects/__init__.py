"""The object graph: what Python objects hold, taken once by identity and put back in place."""
