"""Kubernetes: an Indexed Job, owned by the launching pod, whose pods are machines.

It is not the Job of the flow with more completions: a lost node counts as a failed pod there, and Prefect's worker
would call the flow run crashed. The nodes reach the launcher by the address of its pod, so no Service is needed.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, cast
from uuid import uuid4

from pydantic import ValidationError

from midstride.engine.errors import JobError, StrategyUnavailable, WorldError
from midstride.engine.launch.clusters.base import SECRET, Cluster, NodeRequest, join_command

__all__ = ["LABEL", "Kubernetes"]

#: of each node, by which a NetworkPolicy finds them
LABEL = {"app.kubernetes.io/name": "midstride-node"}
#: of the one container
_CONTAINER = "node"
#: in the Secret of a Job
_SECRET_KEY = "secret"
#: fields that a node's pod copies from the launcher's pod, and fields that its container copies
_OF_POD = ("affinity", "dnsPolicy", "imagePullSecrets", "nodeSelector", "securityContext", "tolerations", "volumes")
_OF_CONTAINER = (
    "env",
    "envFrom",
    "image",
    "imagePullPolicy",
    "resources",
    "securityContext",
    "volumeMounts",
    "workingDir",
)
_RULES: list[dict[str, Any]] = [
    # A machine that is taken away is no failure, nor is a node that was asked to leave.
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "Ignore", "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [75]}},
    # An error in the job is none that another try would mend.
    {"action": "FailIndex", "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [2]}},
]
#: how often a pod of one node is made anew that failed, not counting those whose machine was taken away
_FAILURES = 20
#: beyond the grace, for a pod to end
_MARGIN_S = 10
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Kubernetes(Cluster):
    """Creates a Job; it ends with the launcher's pod, also if that is lost."""

    name: ClassVar[str] = "kubernetes"

    def __init__(self, request: NodeRequest) -> None:
        super().__init__(request)
        slug = re.sub(r"[^a-z0-9]+", "-", request.run.lower()).strip("-")[:40]
        self._job = f"midstride-{slug}-{uuid4().hex[:6]}"
        self._namespace = request.arguments.get("namespace") or _own_namespace()
        self._api: Any = None

    def describe(self, address: str) -> str:
        """Return the manifest as JSON, without the parts that it inherits from the launcher's pod."""
        return f"kubectl create --filename=- <<< {json.dumps(self.manifest(address, {}))}"

    def start(self, address: str, secret: str) -> str:
        """Create the Job, and a Secret that is deleted with it; return the name of the Job."""
        if find_spec("kubernetes") is None:
            raise StrategyUnavailable('world.on is kubernetes: pip install "midstride[kubernetes]"')
        from kubernetes import client

        with self._answers():
            _connect()
            self._api = client.BatchV1Api()
            manifest = self.manifest(address, self._own_pod())
        if "image" not in _container(manifest):
            raise JobError(
                "world.on_args.image: is missing; outside a cluster there is no launcher pod to take the image from"
            )
        with self._answers():
            job = self._api.create_namespaced_job(self._namespace, manifest)
            body: Any = self._secret(secret, job.metadata.uid)  # a dict, where the library's types want a model
            try:
                client.CoreV1Api().create_namespaced_secret(self._namespace, body)
            except BaseException:
                self.stop()
                raise
        where = f"kubectl --namespace={self._namespace} describe job {self._job}"
        return f"Kubernetes' job {self._job} starts the nodes: {where} shows how they are"

    def end_reason(self) -> str:
        """Return how the Job has ended."""
        from kubernetes.client import ApiException

        try:
            job = self._api.read_namespaced_job(self._job, self._namespace)
        except ApiException as error:
            if error.status == 404:
                return f"Kubernetes' job {self._job} was deleted, and no node is left"
            raise
        for condition in job.status.conditions or []:
            if condition.type in ("Complete", "Failed") and condition.status == "True":
                why = ": ".join(text for text in (condition.reason, condition.message) if text)
                return (
                    f"Kubernetes' job {self._job} has ended ({why or condition.type}), and no node is left: "
                    f"kubectl --namespace={self._namespace} logs job/{self._job} says why"
                )
        return ""

    def stop(self) -> None:
        """Delete the Job and its pods."""
        from kubernetes.client import ApiException

        if self._api is None:
            return
        try:
            self._api.delete_namespaced_job(self._job, self._namespace, propagation_policy="Background")
        except ApiException as error:
            if error.status != 404:
                raise

    def manifest(self, address: str, pod: dict[str, Any]) -> dict[str, Any]:
        """Return the Job.

        Args:
            address: HOST:PORT of the launcher.
            pod: that of the launcher, as the API gives it; {} outside a cluster.
        """
        metadata: dict[str, Any] = {"name": self._job, "namespace": self._namespace, "labels": LABEL}
        if pod:
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}]
        spec = {
            "completionMode": "Indexed",
            "completions": self.request.nodes.most,
            "parallelism": self.request.nodes.most,
            "backoffLimitPerIndex": _FAILURES,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _RULES},
            "template": {"metadata": {"labels": LABEL}, "spec": self._pod_spec(address, pod.get("spec", {}))},
        }
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}

    def _secret(self, secret: str, job_uid: str) -> dict[str, Any]:
        """Return the Secret that the nodes' pods wait for, owned by the Job."""
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self._job, "uid": job_uid}
        metadata = {"name": self._job, "namespace": self._namespace, "labels": LABEL, "ownerReferences": [owner]}
        stored = {"type": "Opaque", "immutable": True, "stringData": {_SECRET_KEY: secret}}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, **stored}

    def _pod_spec(self, address: str, own: dict[str, Any]) -> dict[str, Any]:
        """Return the pod spec of a node, given that of the launcher's pod."""
        arguments = self.request.arguments
        chosen: dict[str, Any] = {}
        if image := arguments.get("image"):
            chosen["image"] = image
        if resources := arguments.get("resources"):
            chosen["resources"] = {
                kind: {name: str(amount) for name, amount in amounts.items()} for kind, amounts in resources.items()
            }
        python = "python" if "image" in chosen else sys.executable
        token = [volume["name"] for volume in own.get("volumes", []) if volume["name"].startswith("kube-api-access-")]
        inherited = _some((own.get("containers") or [{}])[0], _OF_CONTAINER, token)
        from_secret = {"secretKeyRef": {"name": self._job, "key": _SECRET_KEY}}
        others = [variable for variable in inherited.get("env", []) if variable["name"] != SECRET]
        container = {
            **inherited,
            **chosen,
            "env": [*others, {"name": SECRET, "valueFrom": from_secret}],
            "name": _CONTAINER,
            "command": [python, *join_command(address)[1:]],
        }
        return {
            **_some(own, _OF_POD, token),
            **arguments.get("pod", {}),
            "automountServiceAccountToken": False,
            "containers": [container],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": int(self.request.grace_s) + _MARGIN_S,
        }

    def _own_pod(self) -> dict[str, Any]:
        """Return the launcher's own pod; {} outside a cluster."""
        from kubernetes import client

        if "KUBERNETES_SERVICE_HOST" not in os.environ:
            return {}
        pod = client.CoreV1Api().read_namespaced_pod(os.environ["HOSTNAME"], self._namespace)
        return cast("dict[str, Any]", client.ApiClient().sanitize_for_serialization(pod))

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Convert errors of the API in the block into messages with a way out."""
        from kubernetes.client import ApiException
        from kubernetes.config import ConfigException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            said = _message(error)
            if error.status == 403:
                raise JobError(
                    f"Kubernetes refuses: {said}\n  the launcher's service account must be permitted to get pods, to "
                    f"create, get and delete jobs, and to create secrets in {self._namespace}: "
                    f"deploy/kubernetes/nodes.yaml has such a "
                    "role"
                ) from error
            if error.status is not None and 400 <= error.status < 500 and error.status != 429:
                raise JobError(f"Kubernetes refuses: {said}") from error
            raise WorldError(f"Kubernetes sent an unexpected answer: {said}") from error
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in error.errors()]
            raise JobError(f"world.on_args: invalid pod: {'; '.join(faults)}") from error
        except ConfigException as error:
            raise StrategyUnavailable(
                f"world.on is kubernetes, but no cluster was found: {error}. Launch in a pod, or set KUBECONFIG"
            ) from error
        except HTTPError as error:
            raise WorldError(f"Kubernetes' API does not answer: {error}") from error


def _connect() -> None:
    from kubernetes import config

    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        config.load_incluster_config()
    else:
        config.load_kube_config()


def _own_namespace() -> str:
    try:
        return (_ACCOUNT / "namespace").read_text().strip()
    except FileNotFoundError:
        return "default"


def _some(found: dict[str, Any], keys: tuple[str, ...], token: list[str]) -> dict[str, Any]:
    """Return some fields of a pod or its container, without its service account's token."""
    chosen = {key: found[key] for key in keys if key in found}
    for key in ("volumes", "volumeMounts"):
        if key in chosen:
            chosen[key] = [one for one in chosen[key] if one["name"] not in token]
    return chosen


def _container(manifest: dict[str, Any]) -> dict[str, Any]:
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    return cast("dict[str, Any]", container)


def _message(error: Any) -> str:
    """Return the sentence in an answer of the API."""
    try:
        return str(json.loads(error.body)["message"])
    except (KeyError, TypeError, ValueError):
        return f"{error.status} {error.reason}"
