"""Names of a run's artifacts and events in the orchestrator."""

import re

from midstride.engine.formatting import format_run_name, url_name

__all__ = ["artifact_key", "model", "resource"]


def artifact_key(url: str, what: str) -> str:
    """Return the artifact key of a run: small letters, digits and dashes, as Prefect requires.

    Of a run that is named after its flow run's id the beginning is enough, and can be read in the UI.

    >>> artifact_key("/data/runs/Digits_7", "report")
    'digits-7-report'
    >>> artifact_key("/data/runs/684f55e0-7a6c-4c5b-abd6-57172dac4886", "report")
    '684f55e0-report'
    """
    name = format_run_name(url_name(url))
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + f"-{what}"


def resource(url: str) -> dict[str, str]:
    """Return the resource that events about the run at `url` are about.

    >>> resource("/data/runs/digits-7")["prefect.resource.id"]
    'midstride.run.digits-7'
    """
    name = url_name(url)
    return {"prefect.resource.id": f"midstride.run.{name}", "prefect.resource.name": name, "midstride.url": url}


def model(job: str) -> dict[str, str]:
    """Return the resource that events about the champions of the job called `job` are about.

    >>> model("digits")["prefect.resource.id"]
    'midstride.model.digits'
    """
    return {"prefect.resource.id": f"midstride.model.{job}", "prefect.resource.name": job}
