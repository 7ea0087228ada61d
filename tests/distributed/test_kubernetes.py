"""`world.on: kubernetes`: what is asked of the API, what it answers, and a world whose pods are processes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.flow_runs import results, tiny_job, train_forked, wait_for
from support.kubernetes_api import KubernetesApi, kubernetes_api
from support.limit import LIMIT_S

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.nodes import Nodes
from midstride.engine.errors import EngineError, JobError, WorldError
from midstride.engine.launch.clusters.base import NodeRequest
from midstride.engine.launch.clusters.kubernetes import Kubernetes
from midstride.engine.processes.lifetime import descendants, signal_all
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import report_of

TOKEN = "kube-api-access-x7k2p"
SECRET = "5" * 64
LAUNCHER: dict[str, Any] = {
    "serviceAccountName": "midstride-nodes",
    "nodeSelector": {"pool": "gpu"},
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": TOKEN, "projected": {"sources": []}}],
    "containers": [
        {
            "name": "prefect-job",
            "image": "midstride:1",
            "args": ["prefect", "flow-run", "execute"],
            "env": [{"name": "A", "value": "b"}],
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
            "volumeMounts": [
                {"name": "shm", "mountPath": "/dev/shm"},
                {"name": TOKEN, "mountPath": "/var/run/secrets"},
            ],
        }
    ],
}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubernetesApi]:
    """An API, and this process in the pod `launcher`."""
    with kubernetes_api(tmp_path / "cluster") as served, pytest.MonkeyPatch.context() as patch:
        served.add_pod("launcher", LAUNCHER)
        # KUBECONFIG is looked at when the library is imported.
        patch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(served.config))
        for name, text in cluster_of(served).items():
            patch.setenv(name, text)
        yield served


def cluster_of(api: KubernetesApi) -> dict[str, str]:
    """Return what the environment says in the pod `launcher`."""
    return {"KUBECONFIG": str(api.config), "KUBERNETES_SERVICE_HOST": "127.0.0.1", "HOSTNAME": "launcher"}


@pytest.fixture
def outside(api: KubernetesApi) -> Iterator[None]:
    """This process is in no pod."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KUBERNETES_SERVICE_HOST")
        yield


def cluster(**arguments: object) -> Kubernetes:
    return Kubernetes(NodeRequest("Nightly_1", "s3://runs/a", Nodes(1, 4, lanes=4), arguments, 20.0))


def test_nodes_are_pods_like_the_launchers_and_go_with_it(api: KubernetesApi) -> None:
    ours = cluster(resources={"limits": {"nvidia.com/gpu": 2}}, pod={"priorityClassName": "low"})
    assert "kubectl --namespace=default describe job midstride-nightly-1-" in ours.start("10.0.0.1:29400", SECRET)
    [(name, job)] = api.jobs.items()
    assert job["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Pod", "name": "launcher", "uid": "uid-of-launcher"}
    ]
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (4, 4)
    pod = job["spec"]["template"]
    assert "prefect.io/flow-run-id" not in pod["metadata"]["labels"], "a lost node would end the flow run"
    assert pod["spec"]["terminationGracePeriodSeconds"] > 20
    chosen = {
        key: pod["spec"].get(key) for key in ("nodeSelector", "priorityClassName", "volumes", "serviceAccountName")
    }
    assert chosen == {
        "nodeSelector": {"pool": "gpu"},
        "priorityClassName": "low",
        "volumes": LAUNCHER["volumes"][:1],
        "serviceAccountName": None,
    }
    [container] = pod["spec"]["containers"]
    assert container["command"] == [sys.executable, "-m", "midstride.engine", "join", "10.0.0.1:29400", "--wait=30"]
    from_secret = {"secretKeyRef": {"name": name, "key": "secret"}}
    variables = [{"name": "A", "value": "b"}, {"name": "MIDSTRIDE_SECRET", "valueFrom": from_secret}]
    assert (container["image"], container["env"]) == ("midstride:1", variables)
    assert SECRET not in f"{job}{ours.describe('10.0.0.1:29400')}"
    [secret] = api.secrets.values()
    assert (secret["metadata"]["name"], secret["stringData"]) == (name, {"secret": SECRET})
    assert [owner["uid"] for owner in secret["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert ours.end_reason() == ""
    ours.stop()
    assert api.deleted == [(name, "Background")]
    assert ours.end_reason() == f"Kubernetes' job {name} was deleted, and no node is left"
    ours.stop()

    cluster().start("10.0.0.1:29400", SECRET)
    api.lose_pod("launcher")
    assert api.jobs == {}


def test_a_pod_that_is_none_is_named(api: KubernetesApi) -> None:
    with pytest.raises(JobError, match=r"world.on_args: .*spec.template.spec.tolerations.*: .*list"):
        cluster(pod={"tolerations": "none"}).start("10.0.0.1:29400", SECRET)
    assert api.jobs == {}


def test_why_no_node_will_come_is_said(api: KubernetesApi) -> None:
    ours = cluster()
    ours.start("10.0.0.1:29400", SECRET)
    [job] = api.jobs.values()
    job["status"] = {
        "conditions": [
            {"type": "SuccessCriteriaMet", "status": "True"},
            {"type": "Failed", "status": "True", "reason": "FailedIndexes", "message": "Job has failed indexes"},
        ]
    }
    assert " has ended (FailedIndexes: Job has failed indexes), and no node is left: kubectl" in ours.end_reason()


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ((403, 'jobs.batch is forbidden: User "a" cannot create'), JobError, r"is forbidden: .*\n.*deploy/kubernetes"),
        ((422, "spec.parallelism: Invalid value"), JobError, "Kubernetes refuses: spec.parallelism: Invalid value"),
        ((500, "etcdserver: request timed out"), WorldError, "sent an unexpected answer: etcdserver: request"),
    ],
)
def test_what_the_api_refuses_is_said_in_its_words(
    api: KubernetesApi, answer: tuple[int, str], error: type[EngineError], words: str
) -> None:
    api.refuses = answer
    with pytest.raises(error, match=words):
        cluster().start("10.0.0.1:29400", SECRET)


def test_without_its_secret_no_job_is_left(api: KubernetesApi) -> None:
    api.refuses, api.refuses_kind = (403, 'secrets is forbidden: User "a" cannot create'), "secrets"
    with pytest.raises(JobError, match="secrets is forbidden"):
        cluster().start("10.0.0.1:29400", SECRET)
    assert api.jobs == {}


@pytest.mark.usefixtures("outside")
def test_outside_a_cluster_an_image_is_required(api: KubernetesApi) -> None:
    with pytest.raises(JobError, match=r"world.on_args.image: is missing"):
        cluster().start("10.0.0.1:29400", SECRET)
    cluster(image="midstride:2").start("10.0.0.1:29400", SECRET)
    [job] = api.jobs.values()
    assert "ownerReferences" not in job["metadata"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["command"][0]) == ("midstride:2", "python")


@pytest.mark.skipif("config.getoption('--laws') != 'all'", reason="one of the rows that --laws=all runs")
def test_a_machine_that_is_taken_away_changes_no_bit(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    job = tiny_job(tmp_path, steps=64, lingers=str(slow))
    slow.touch()
    world = {"strategy": "ddp", "processes": 1, "lanes": 2, "nodes": "1:2", "on": "kubernetes", "grow_after_s": 0}
    options = [f"--set=world.{key}={value}" for key, value in {**world, "rendezvous": "127.0.0.1:0"}.items()]
    command = [sys.executable, "-m", "midstride.engine", "fit", f"{tmp_path}/job.yaml", "--run", "a", *options]
    with kubernetes_api(tmp_path / "cluster", runs=True) as api, (tmp_path / "fit.txt").open("wb") as out:
        api.add_pod("launcher", LAUNCHER)
        environment = {**os.environ, **cluster_of(api)}
        launcher = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)

        def said(words: str) -> bool:
            return re.search(words, (tmp_path / "fit.txt").read_text()) is not None

        try:
            wait_for(lambda: said("2 ranks"), "a round of two")
            wait_for((tmp_path / "mark").exists, "a step behind a snapshot")
            api.lose_machine(0)
            wait_for(lambda: said("round 2: .* 1 rank"), "a round without it")
            api.give_machine()
            wait_for(lambda: said("can train as well"), "the pod that takes its place")
            slow.unlink()
            assert launcher.wait(LIMIT_S) == 0, (tmp_path / "fit.txt").read_text()
        finally:
            signal_all([*descendants(launcher.pid), launcher.pid])
            launcher.wait()
        assert api.jobs == {}, "nothing is left"
    tiny_job(tmp_path / "alone", processes=1, steps=64)
    alone = TrainingJob.load(tmp_path / "alone" / "job.yaml", ["world.strategy=ddp", "world.lanes=2"])
    train_forked(alone, "a")
    assert results(job, "a") == results(alone, "a")
    assert [one.ranks for one in report_of(Run(job, "a")).rounds] == [2, 1, 2]
