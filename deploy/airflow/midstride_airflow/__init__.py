"""Airflow provider for midstride: its stages as operators over the command line.

operators   prepare, fit, evaluate, compare
triggers    waits for a run that a scheduler trains
commands    command lines, and what they print
"""

from typing import Any

__all__ = ["get_provider_info"]


def get_provider_info() -> dict[str, Any]:
    """Return what Airflow lists of this provider."""
    return {
        "package-name": "midstride-airflow",
        "name": "midstride",
        "description": "PyTorch training whose retries resume bit for bit.",
        "integrations": [
            {"integration-name": "midstride", "external-doc-url": "https://github.com/midstride/midstride"}
        ],
        "operators": [{"integration-name": "midstride", "python-modules": ["midstride_airflow.operators"]}],
        "triggers": [{"integration-name": "midstride", "python-modules": ["midstride_airflow.triggers"]}],
    }
