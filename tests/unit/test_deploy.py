"""What stands in deploy/ is what Docker, Kubernetes and Prefect take: there is no engine here to try it on."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import check_jsonschema
import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from ruamel.yaml import YAML

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.launchers import LAUNCHERS
from midstride.engine.launch.clusters.kubernetes import LABEL
from midstride.engine.session.requests import GRACE_S

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = "1.34.0"
POOLS = ("docker", "kubernetes")


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in YAML(typ="safe", pure=True).load_all(path) if document]


def pool(kind: str) -> dict[str, Any]:
    template: dict[str, Any] = json.loads((DEPLOY / kind / "pool.json").read_text())
    return template


def prefects_pool(kind: str) -> dict[str, Any]:
    """Return the template that Prefect itself has for a kind of pool; looked up without importing Prefect."""
    import importlib.util

    home = Path(importlib.util.find_spec("prefect").submodule_search_locations[0])
    path = home / "server" / "api" / "collections_data" / "views" / "aggregate-worker-metadata.json"
    template: dict[str, Any] = json.loads(path.read_text())[f"prefect-{kind}"][kind]["default_base_job_configuration"]
    return template


def rendered(template: Any, values: dict[str, Any]) -> Any:
    """Put `values` into a template as a worker does: what has no value is left out."""
    if isinstance(template, dict):
        inner = {key: rendered(item, values) for key, item in template.items()}
        return {key: item for key, item in inner.items() if item is not None}
    if isinstance(template, list):
        return [rendered(item, values) for item in template]
    if isinstance(template, str) and (whole := re.fullmatch(r"\{\{ (\w+) \}\}", template)):
        return values.get(whole[1])
    if isinstance(template, str):
        return re.sub(r"\{\{ (\w+) \}\}", lambda found: str(values[found[1]]), template)
    return template


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_files_are_what_compose_takes(name: str):
    vendored = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(vendored.read_text())
    [document] = documents(DEPLOY / "docker" / name)
    assert [fault.message for fault in validator_for(schema)(schema).iter_errors(document)] == []


def test_the_station_is_whole():
    text = (DEPLOY / "docker" / "compose.yaml").read_text()
    [document] = documents(DEPLOY / "docker" / "compose.yaml")
    services = document["services"]
    assert set(services) == {"database", "server", "store", "setup", "worker"}
    asked = set(re.findall(r"\$\{([A-Z0-9_]+)", text))
    example = (DEPLOY / "docker" / ".env.example").read_text()
    assert asked == set(re.findall(r"^([A-Z0-9_]+)=", example, re.MULTILINE))
    for service in services.values():
        for needed in service.get("depends_on", {}):
            assert needed in services
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in document["volumes"]
    assert int(services["worker"]["stop_grace_period"].removesuffix("s")) > GRACE_S
    # What compose calls the network and the volume, the pool of containers asks for.
    properties = pool("docker")["variables"]["properties"]
    assert properties["networks"]["default"] == [f"{document['name']}_default"]
    assert properties["volumes"]["default"] == [f"{document['name']}_results:/srv/results"]


def test_the_image_copies_what_there_is():
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?:--\S+ )?(.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (DEPLOY.parent / source).exists(), source


@pytest.mark.parametrize("kind", POOLS)
def test_a_pool_keeps_what_prefect_has_for_its_kind(kind: str):
    ours, theirs = pool(kind), prefects_pool(kind)
    Draft202012Validator.check_schema(ours["variables"])
    configuration, properties = ours["job_configuration"], ours["variables"]["properties"]
    # A cluster's own pods reach it by their service account.
    assert set(theirs["job_configuration"]) - {"cluster_config"} <= set(configuration)
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(configuration)))
    assert used == set(properties), "each variable is used, each placeholder is a variable"
    assert all(field.get("title") and field.get("description") for field in properties.values())
    defaults = {name: field["default"] for name, field in properties.items() if "default" in field}
    Draft202012Validator(ours["variables"]).validate(defaults)
    assert set(theirs["variables"]["properties"]) - {"cluster_config"} <= set(properties)


def job_of_a_run() -> dict[str, Any]:
    """Return the Job that the worker makes where every variable has its default."""
    template = pool("kubernetes")
    properties = template["variables"]["properties"]
    values = {name: field["default"] for name, field in properties.items() if "default" in field}
    # What the worker fills in.
    values |= {"name": "night", "labels": {"app": "run"}, "env": [{"name": "A", "value": "b"}], "command": ["prefect"]}
    job: dict[str, Any] = rendered(template["job_configuration"], values)["job_manifest"]
    return job


def manifests() -> list[dict[str, Any]]:
    return [document for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for document in documents(path)]


#: name -> what has a pod's template
WITH_PODS = {found["metadata"]["name"]: found for found in manifests() if "template" in found.get("spec", {})}


def test_a_run_in_a_cluster_is_a_job_that_kubernetes_takes():
    job = job_of_a_run()
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > GRACE_S + 5
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts["/srv/results"]]
    assert job["spec"]["backoffLimit"] == 0, "a retry is Prefect's to make"


@pytest.mark.parametrize("name", [*WITH_PODS, "run"])
def test_a_pod_may_do_no_more_than_it_has_to(name: str):
    pod = (WITH_PODS.get(name) or job_of_a_run())["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert not any("hostPath" in volume for volume in pod.get("volumes", []))
    assert name == "worker" or pod["automountServiceAccountToken"] is False, "only the worker calls the cluster"
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        allowed = container["securityContext"]
        assert allowed["allowPrivilegeEscalation"] is False
        assert allowed["capabilities"] == {"drop": ["ALL"]}
        assert name == "database" or allowed["readOnlyRootFilesystem"] is True
        assert "memory" in container["resources"]["limits"]
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        # What cannot be written otherwise: caches and temporary files.
        if name != "database":
            assert {"/home/midstride", "/tmp"} <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_cluster_refuses_privileged_pods_and_unneeded_calls():
    kinds: dict[str, dict[str, Any]] = {}
    for found in manifests():
        kinds.setdefault(found["kind"], {})[found.get("metadata", {}).get("name", "")] = found
    [space] = kinds["Namespace"].values()
    assert space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    policies = [found["spec"] for found in kinds["NetworkPolicy"].values()]
    assert {"podSelector": {}, "policyTypes": ["Ingress"]} in policies, "what no other policy lets in stays out"
    rules = [(policy["podSelector"], rule) for policy in policies for rule in policy.get("ingress", [])]
    let_in = {
        (selector["matchLabels"]["app"], port["port"]) for selector, rule in rules for port in rule.get("ports", [])
    }
    services = {
        (service["spec"]["selector"]["app"], service["spec"]["ports"][0]["port"])
        for service in kinds["Service"].values()
    }
    assert let_in == services
    # Ranks meet on any port: those of the nodes of a run, and the run that launches them.
    any_port = [(selector, rule["from"]) for selector, rule in rules if "ports" not in rule]
    node, run = {"matchLabels": LABEL}, {"key": "prefect.io/flow-run-id", "operator": "Exists"}
    assert any_port == [(node, [{"podSelector": node}]), ({"matchExpressions": [run]}, [{"podSelector": node}])]


def test_a_run_that_starts_nodes_may_do_what_that_takes():
    roles = [found for found in manifests() if found["kind"] == "Role"]
    [role] = [found for found in roles if found["metadata"]["name"] == "midstride-nodes"]
    allowed = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert allowed == {("pods", "get"), ("jobs", "create"), ("jobs", "get"), ("jobs", "delete"), ("secrets", "create")}


def test_images_are_named_by_an_exact_version():
    version = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["version"]
    [ours] = documents(DEPLOY / "kubernetes" / "kustomization.yaml")[0]["images"]
    assert ours["newTag"] == version
    assert pool("kubernetes")["variables"]["properties"]["image"]["default"] == f"{ours['newName']}:{version}"
    assert pool("docker")["variables"]["properties"]["image"]["default"] == f"midstride:{version}"
    [compose] = documents(DEPLOY / "docker" / "compose.yaml")
    images = [service["image"] for service in compose["services"].values()]
    for found in WITH_PODS.values():
        images += [container["image"] for container in found["spec"]["template"]["spec"]["containers"]]
    images += re.findall(r"^FROM (\S+)", (DEPLOY / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    for image in images:
        # Kustomize gives ours its version in a cluster.
        assert image in ("midstride", f"midstride:{version}") or re.search(r":\d+\.\d+", image), image


def test_the_image_installs_the_tested_files_by_hash():
    requirements, constraints = pins(DEPLOY / "docker" / "requirements.txt"), pins(DEPLOY.parent / "constraints.txt")
    shared = requirements.keys() & constraints.keys()
    assert {name: requirements[name][0] for name in shared} == {name: constraints[name][0] for name in shared}
    assert all(hashes for _, hashes in requirements.values())
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    asked += project["project"]["optional-dependencies"]["examples"]
    assert {plain(re.split(r"[<>=]", line)[0]) for line in asked} <= requirements.keys()
    assert "--require-hashes -r requirements.txt" in (DEPLOY / "docker" / "Dockerfile").read_text()


def plain(name: str) -> str:
    """Return a package's name as the registry compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, tuple[str, list[str]]]:
    """Return each package of a list of requirements: its version, and the hashes of its files."""
    text = path.read_text().replace("\\\n", "")
    found = re.findall(r"^([\w.-]+)==(\S+)(.*)$", text, re.MULTILINE)
    return {
        plain(name): (version, re.findall(r"--hash=sha256:([0-9a-f]{64})\b", rest)) for name, version, rest in found
    }


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_are_what_kubernetes_takes(path: Path):
    for document in documents(path):
        if document["kind"] == "Kustomization":
            folder = {found.name for found in path.parent.iterdir()}
            assert {*document["resources"], *document["configMapGenerator"][0]["files"]} == folder - {path.name}
        else:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_what_manifests_name_is_there():
    named = {(document["kind"], document["metadata"]["name"]) for document in manifests() if "metadata" in document}
    properties = pool("kubernetes")["variables"]["properties"]
    assert ("PersistentVolumeClaim", properties["results_claim"]["default"]) in named
    assert ("ServiceAccount", properties["service_account_name"]["default"]) in named
    assert ("Namespace", properties["namespace"]["default"]) in named


def test_the_page_on_nights_shows_the_trigger_of_the_file():
    [document] = documents(DEPLOY / "prefect.yaml")
    [triggers] = [deployment["triggers"] for deployment in document["deployments"] if "triggers" in deployment]
    blocks = re.findall(
        r"^```yaml\n(.*?)^```$", (DEPLOY.parent / "docs" / "nightly.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert {"triggers": triggers} in [YAML(typ="safe", pure=True).load(block) for block in blocks]


def test_deployments_of_the_file_hold_a_portable_job():
    [document] = documents(DEPLOY / "prefect.yaml")
    schema = Draft202012Validator(TrainingJob.model_json_schema())
    for deployment in document["deployments"]:
        module, _, flow = deployment["entrypoint"].rpartition(".")
        assert (DEPLOY.parent / module.removeprefix("midstride.").replace(".", "/")).with_suffix(".py").exists(), flow
        assert "midstride" in deployment["tags"]
        job = deployment["parameters"]["job"]
        assert [fault.message for fault in schema.iter_errors(job)] == []
        assert TrainingJob.model_validate(job).world.launched_by in LAUNCHERS
