"""Prefect flows, and the command line that runs them."""
