"""Prefect tasks: one verb of the engine each."""
