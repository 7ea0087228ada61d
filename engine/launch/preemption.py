"""Preemption notices of spot machines: requests a snapshot while there is time.

Sources:
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption
    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

__all__ = ["PROVIDERS", "PreemptionWatch", "Provider"]

_POLL_S = 5.0
_ANSWER_S = 2.0
#: the metadata of a machine is not to be asked for through a proxy
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


@dataclass(frozen=True)
class Provider:
    """Source of a provider's preemption notices.

    Args:
        url: of its metadata server.
        path: of the notice.
        notice: returns the announcement in an answer; "" without one.
        headers: of the request.
        token_path: where a token is had first, which goes along as `token_header`; "" if there is none.
        token_header: name of the header.
        host_variable: environment variable that names another server, as the provider's own libraries read it.
    """

    url: str
    path: str
    notice: Callable[[str], str]
    headers: Mapping[str, str] = field(default_factory=dict)
    token_path: str = ""
    token_header: str = ""
    host_variable: str = ""

    def ask(self) -> str:
        """Return the notice; "" if there is none.

        Raises:
            OSError: the metadata server does not answer.
            ValueError: its answer is not in the provider's documented form.
        """
        url = os.environ.get(self.host_variable) or self.url
        url = url if "://" in url else f"http://{url}"
        headers = dict(self.headers)
        if self.token_path:
            lifetime = {f"{self.token_header}-ttl-seconds": "60"}
            headers[self.token_header] = _body(f"{url}{self.token_path}", lifetime, "PUT")
        try:
            return self.notice(_body(f"{url}{self.path}", headers))
        except urllib.error.HTTPError as error:
            if error.code == 404:  # how AWS says that there is none
                return ""
            raise


def _body(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    with _open(request, timeout=_ANSWER_S) as answer:
        return str(answer.read(1 << 16), "utf-8")


def _aws(body: str) -> str:
    said = json.loads(body)
    return f"{said['action']} at {said['time']}"


def _gcp(body: str) -> str:
    return "preempted" if body.strip() == "TRUE" else ""


def _azure(body: str) -> str:
    events = [event for event in json.loads(body)["Events"] if event["EventType"] == "Preempt"]
    return f"Preempt not before {events[0]['NotBefore'] or 'now'}" if events else ""


PROVIDERS: dict[str, Provider] = {
    "aws": Provider(
        "http://169.254.169.254",
        "/latest/meta-data/spot/instance-action",
        _aws,
        token_path="/latest/api/token",
        token_header="X-aws-ec2-metadata-token",
        host_variable="AWS_EC2_METADATA_SERVICE_ENDPOINT",
    ),
    "gcp": Provider(
        "http://metadata.google.internal",
        "/computeMetadata/v1/instance/preempted",
        _gcp,
        {"Metadata-Flavor": "Google"},
        host_variable="GCE_METADATA_HOST",
    ),
    "azure": Provider(
        "http://169.254.169.254",
        "/metadata/scheduledevents?api-version=2020-07-01",
        _azure,
        {"Metadata": "true"},
    ),
}


class PreemptionWatch:
    """Polls a provider, in a thread, until a preemption notice comes or the block ends.

    Args:
        name: of the provider; None if it is not to be asked for.
        on_notice: called once, in the thread, with a sentence on the announcement.
        on_silence: called once, in the thread, with a sentence, should the metadata server not answer.
    """

    def __init__(
        self, name: str | None, on_notice: Callable[[str], object], on_silence: Callable[[str], object]
    ) -> None:
        self._name, self._on_notice, self._on_silence = name, on_notice, on_silence
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="preemption notice", daemon=True)

    def __enter__(self) -> "PreemptionWatch":
        if self._name is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()

    def _watch(self) -> None:
        silent = False
        while not self._ended.is_set():
            try:
                notice = PROVIDERS[self._name or ""].ask()
            except (OSError, ValueError, KeyError, TypeError) as error:
                if not silent:
                    self._on_silence(
                        f"world.preemption_notice: {self._name}: its metadata server does not say whether this machine "
                        f"will be taken away ({type(error).__name__}: {error}); it is asked again every {_POLL_S:g} s"
                    )
                notice, silent = "", True
            if notice:
                self._on_notice(f"{self._name} announces that this machine will be taken away: {notice}")
                return
            self._ended.wait(_POLL_S)
