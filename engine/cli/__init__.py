"""The commands that need no Prefect."""
