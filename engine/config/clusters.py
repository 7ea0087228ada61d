"""Table of clusters: their classes and the `on_args` that they accept.

Reading the table imports none of them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from midstride.engine.config.arguments import Arguments
from midstride.engine.config.options import Options
from midstride.engine.config.validation import validation_errors

__all__ = ["CLUSTERS", "ClusterSpec", "KubernetesArguments", "RayArguments", "SlurmArguments", "on_args_errors"]

#: option of sbatch that midstride sets itself -> the key of `world` it follows from; "" if there is none
_SLURM_OWN = {
    "array": "nodes",
    "nodes": "nodes",
    "ntasks": "processes",
    "ntasks_per_node": "processes",
    "kill_on_invalid_dep": "",
    "no_kill": "",
    "no_requeue": "",
    "parsable": "",
    "requeue": "",
    "signal": "",
    "wait": "",
    "wrap": "",
    "export": "",
}


class SlurmArguments(Options):
    """Options of sbatch by their long names, with _ or -; true is an option without a value."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _options_of_sbatch(self) -> Self:
        faults = []
        for key, value in (self.model_extra or {}).items():
            name = key.replace("-", "_")
            if not re.fullmatch("[a-z][a-z0-9_]+", name):
                faults.append(f"{key!r} is no long option of sbatch, such as partition or gpus_per_node")
            elif name in _SLURM_OWN:
                instead = f": set world.{_SLURM_OWN[name]}" if _SLURM_OWN[name] else ", and leaves no choice"
                faults.append(f"{key} is set for sbatch by midstride{instead}")
            elif not isinstance(value, str | int | float) or value is False:
                faults.append(f"{key} should be text, a number or true, not {value!r}")
        if faults:
            raise ValueError("; ".join(faults))
        return self


class RayArguments(Options):
    """Ray's address, and its requirements of a node."""

    address: str = Field("auto", description="HOST:PORT of the cluster, or ray://HOST:PORT; auto: this machine's.")
    resources: dict[str, Annotated[float, Field(strict=True, ge=0)]] = Field(
        {},
        description="Resources of each node, such as GPU: 8. A resource that each machine has once puts one node "
        "on each.",
    )


class KubernetesArguments(Options):
    """Settings of nodes that differ from the launcher's pod."""

    image: str | None = Field(
        None, title="Image", description="Image of the nodes; by default that of the launcher's pod."
    )
    namespace: str | None = Field(
        None, title="Namespace", description="Namespace of the job; by default the launcher's."
    )
    resources: dict[str, dict[str, str | int]] | None = Field(
        None, title="Resources", description="Requests and limits of a node; by default those of the launcher's pod."
    )
    pod: Arguments = Field(
        {}, title="Pod", description="Fields of a node's pod spec, such as nodeSelector, tolerations and volumes."
    )


@dataclass(frozen=True)
class ClusterSpec:
    """One cluster.

    Args:
        target: "package.module:Class".
        arguments: what `on_args` may hold.
    """

    target: str
    arguments: type[Options]


#: name, as `world.on` has it -> what it is
CLUSTERS: dict[str, ClusterSpec] = {
    "slurm": ClusterSpec("midstride.engine.launch.clusters.slurm:Slurm", SlurmArguments),
    "ray": ClusterSpec("midstride.engine.launch.clusters.ray_tasks:Ray", RayArguments),
    "kubernetes": ClusterSpec("midstride.engine.launch.clusters.kubernetes:Kubernetes", KubernetesArguments),
}


def on_args_errors(name: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return messages on arguments that the cluster `name`, or "join", does not accept."""
    if name not in CLUSTERS:
        return [f"on_args without on: set on: {' or on: '.join(CLUSTERS)}"] if arguments else []
    try:
        CLUSTERS[name].arguments.model_validate(arguments)
    except ValidationError as error:
        return validation_errors(error, CLUSTERS[name].arguments, "on_args")
    return []
