"""The part of Kubernetes' API that jobs and pods need, whose pods are processes of this machine.

What is created is held to Kubernetes' own schemas. A job's controller is so much of the real one: it starts a pod for
each index, starts one again that failed, unless its policy says otherwise, and counts those that succeeded. What is
owned goes with its owner.
"""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate

from midstride.engine.processes.lifetime import descendants, signal_all

VERSION = "1.34.0"
_POLL_S = 0.05


class KubernetesApi(ThreadingHTTPServer):
    """One namespace, called "default".

    Args:
        folder: where pods write what they print, and the file `config` for KUBECONFIG is.
        runs: whether pods are started; else they wait for their machines for ever.
    """

    def __init__(self, folder: Path, *, runs: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.runs = folder, runs
        self.pods: dict[str, dict[str, Any]] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, dict[str, Any]] = {}
        #: (status, message) for the next request
        self.refuses: tuple[int, str] | None = None
        #: "jobs" or "secrets", whose requests are refused; all if empty
        self.refuses_kind = ""
        self.deleted: list[tuple[str, str]] = []
        self._running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._lost: set[tuple[str, int]] = set()
        self._lock = threading.RLock()
        self.config = folder / "config"
        self.config.write_text(json.dumps(_config(self.server_port)))

    def add_pod(self, name: str, spec: dict[str, Any]) -> None:
        """Have a pod that is there already, such as the launcher's."""
        metadata = {"name": name, "namespace": "default", "uid": f"uid-of-{name}"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        kubernetes_validate.validate(pod, VERSION, strict=True)
        self.pods[name] = pod

    def create(self, job: dict[str, Any]) -> dict[str, Any]:
        """Take a job, and start its pods."""
        kubernetes_validate.validate(job, VERSION, strict=True)
        name = job["metadata"]["name"]
        with self._lock:
            self.jobs[name] = {**job, "metadata": {**job["metadata"], "uid": f"uid-of-{name}"}, "status": {}}
        return self.jobs[name]

    def create_secret(self, secret: dict[str, Any]) -> dict[str, Any]:
        """Take a secret, and start the pods of the job that owns it, which wait for it."""
        kubernetes_validate.validate(secret, VERSION, strict=True)
        name = secret["metadata"]["name"]
        [owner] = secret["metadata"]["ownerReferences"]
        with self._lock:
            assert self.jobs[name]["metadata"]["uid"] == owner["uid"]
            self.secrets[name] = secret
            for index in range(self.jobs[name]["spec"]["completions"] if self.runs else 0):
                self._start(name, index)
        return secret

    def delete(self, name: str, policy: str = "Background") -> None:
        """Delete a job and its pods."""
        with self._lock:
            del self.jobs[name]
            self.secrets.pop(name, None)
            self.deleted.append((name, policy))
            for key in [key for key in self._running if key[0] == name]:
                self._end(self._running.pop(key))

    def lose_pod(self, name: str) -> None:
        """Take away a pod that nothing keeps, and what it owns."""
        del self.pods[name]
        for job in [*self.jobs.values()]:
            owners = job["metadata"].get("ownerReferences", [])
            if any(owner["uid"] == f"uid-of-{name}" for owner in owners):
                self.delete(job["metadata"]["name"])

    def lose_machine(self, index: int) -> None:
        """Take away the machine of the node with an index; there is none for its job to start another on."""
        with self._lock:
            [key] = [key for key in self._running if key[1] == index]
            self._lost.add(key)
            self._end(self._running.pop(key))

    def give_machine(self) -> None:
        """Give machines in place of all that were taken away: their jobs start what is missing."""
        with self._lock:
            while self._lost:
                self._start(*self._lost.pop())

    def control(self) -> None:
        """Look after the pods once."""
        with self._lock:
            for (name, index), process in [*self._running.items()]:
                if process.poll() is None:
                    continue
                del self._running[name, index]
                self._ended(name, index, process.returncode)

    def _ended(self, name: str, index: int, code: int) -> None:
        status = self.jobs[name]["status"]
        kind = "succeeded" if code == 0 else "failed"
        status[kind] = status.get(kind, 0) + 1
        rules = self.jobs[name]["spec"]["podFailurePolicy"]["rules"]
        on = [rule["action"] for rule in rules if code in rule.get("onExitCodes", {}).get("values", [])]
        if code != 0 and on != ["FailIndex"]:
            self._start(name, index)
        elif not any(key[0] == name for key in self._running):
            reason = {"type": "Complete"} if not status.get("failed") else {"type": "Failed", "reason": "FailedIndexes"}
            status["conditions"] = [{"status": "True", **reason}]

    def _start(self, name: str, index: int) -> None:
        [container] = self.jobs[name]["spec"]["template"]["spec"]["containers"]
        with (self.folder / f"node-{index}.txt").open("ab") as out:
            self._running[name, index] = subprocess.Popen(
                container["command"],
                env=os.environ | self._variables(container),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _variables(self, container: dict[str, Any]) -> dict[str, str]:
        """Return the environment of a container."""
        found = {}
        for one in container.get("env", []):
            key = one.get("valueFrom", {}).get("secretKeyRef")
            found[one["name"]] = self.secrets[key["name"]]["stringData"][key["key"]] if key else one["value"]
        return found

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        signal_all([process.pid, *descendants(process.pid)])
        process.wait()


class _Handler(BaseHTTPRequestHandler):
    server: KubernetesApi

    def do_GET(self) -> None:
        """Give a pod or a job."""
        kind, name = self.path.split("/")[-2:]
        found = {"pods": self.server.pods, "jobs": self.server.jobs}[kind].get(name)
        self._answer(*((200, found) if found else (404, _status(404, f'{kind} "{name}" not found'))))

    def do_POST(self) -> None:
        """Create a job or a secret."""
        found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = self.path.partition("?")[0].rpartition("/")[2]
        if self.server.refuses and self.server.refuses_kind in ("", kind):
            return self._answer(0, None)
        return self._answer(201, {"jobs": self.server.create, "secrets": self.server.create_secret}[kind](found))

    def do_DELETE(self) -> None:
        """Delete a job."""
        path, _, query = self.path.partition("?")
        name, policy = path.rpartition("/")[2], query.rpartition("propagationPolicy=")[2]
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        if name not in self.server.jobs:
            return self._answer(404, _status(404, f'jobs.batch "{name}" not found'))
        self.server.delete(name, policy)
        return self._answer(200, _status(200, ""))

    def _answer(self, status: int, answer: dict[str, Any] | None) -> None:
        if answer is None:
            assert self.server.refuses is not None
            status, answer = self.server.refuses[0], _status(*self.server.refuses)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "message": message}


def _config(port: int) -> dict[str, Any]:
    """Return a kubeconfig."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [{"name": "tests", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "tests", "user": {"token": "none"}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
    }


@contextmanager
def kubernetes_api(folder: Path, *, runs: bool = False) -> Iterator[KubernetesApi]:
    """Serve the API; its pods end with the block."""
    folder.mkdir(exist_ok=True)
    over = threading.Event()
    with KubernetesApi(folder, runs=runs) as api:

        def control() -> None:
            while not over.wait(_POLL_S):
                api.control()

        threads = [threading.Thread(target=work) for work in (api.serve_forever, control)]
        for thread in threads:
            thread.start()
        try:
            yield api
        finally:
            over.set()
            api.shutdown()
            for thread in threads:
                thread.join()
            for name in [*api.jobs]:
                api.delete(name)
