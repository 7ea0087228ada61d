"""How long a test waits for what others do."""

__all__ = ["LIMIT_S"]

#: for what hangs: a busy machine is no reason to fail
LIMIT_S = 600.0
