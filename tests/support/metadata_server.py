"""A metadata server of a cloud, which answers as the clouds' documentation shows."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

TOKEN = "AQAEAExampleToken"
#: cloud: path of its notice, the header it wants, what it answers when there is none (status, body), and when there is
CLOUDS: dict[str, tuple[str, tuple[str, str], tuple[int, str], str]] = {
    "aws": (
        "/latest/meta-data/spot/instance-action",
        ("X-aws-ec2-metadata-token", TOKEN),
        (404, "<html>Not Found</html>"),
        '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}',
    ),
    "gcp": ("/computeMetadata/v1/instance/preempted", ("Metadata-Flavor", "Google"), (200, "FALSE\n"), "TRUE\n"),
    "azure": (
        "/metadata/scheduledevents?api-version=2020-07-01",
        ("Metadata", "true"),
        (200, '{"DocumentIncarnation": 1, "Events": [{"EventType": "Reboot", "NotBefore": ""}]}'),
        '{"DocumentIncarnation": 2, "Events": [{"EventId": "A1", "EventType": "Preempt", "ResourceType": '
        '"VirtualMachine", "EventStatus": "Scheduled", "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}]}',
    ),
}


class MetadataServer(ThreadingHTTPServer):
    """Of one cloud.

    Args:
        cloud: its name.
    """

    def __init__(self, cloud: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cloud, self.preempted, self.asked = cloud, False, 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: MetadataServer

    def do_PUT(self) -> None:
        """Give a token, as AWS does."""
        wanted = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(*((200, TOKEN) if wanted else (400, "")))

    def do_GET(self) -> None:
        """Tell whether this machine will be taken away."""
        path, (name, value), calm, notice = CLOUDS[self.server.cloud]
        if self.path != path or self.headers[name] != value:
            return self._answer(401, "")
        self.server.asked += 1
        self._answer(*((200, notice) if self.server.preempted else calm))

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def metadata_server(cloud: str) -> Iterator[MetadataServer]:
    """Yield a server that has nothing to announce yet."""
    with MetadataServer(cloud) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
