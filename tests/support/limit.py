"""How long a test waits for what others do."""

#: for what hangs: a busy machine is no reason to fail
LIMIT_S = 600.0
