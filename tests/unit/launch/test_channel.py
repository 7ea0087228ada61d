"""Messages between launcher and nodes: only who knows the secret sends any, and none is changed on its way."""

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from support.limit import LIMIT_S

from midstride.engine.launch.machines.channel import Channel, MessageRefused, SecretRefused
from midstride.engine.launch.machines.connections import LauncherConnection, NodeConnections, Plan

SECRET, OTHER = "5" * 64, "a" * 64

pytestmark = pytest.mark.fast


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket that listens on the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def pair(listener: socket.socket, node_port: int | None = None) -> tuple[Channel, Channel]:
    """Return both ends of a channel: of the launcher, and of the node."""
    with ThreadPoolExecutor() as pool:
        accepted = pool.submit(lambda: Channel.accept(listener.accept()[0], SECRET))
        node = Channel.connect("127.0.0.1", node_port or port_of(listener), SECRET)
        return accepted.result(), node


def frames(sent: list[Any]) -> list[bytes]:
    """Return the frames of messages as a new channel of a node would send them."""
    here, there = socket.socketpair()
    with here, there:
        channel, found = Channel(here, b"k" * 32, (b"node", b"launcher")), []
        for message in sent:
            channel.send(message)
            found.append(there.recv(1 << 16))
    return found


def test_both_ends_talk(listener: socket.socket) -> None:
    launcher, node = pair(listener)
    with closing(launcher), closing(node):
        for number in range(3):
            node.send({"number": number, "text": "ü" * 100_000})
            assert launcher.receive() == {"number": number, "text": "ü" * 100_000}
            launcher.send([number])
            assert node.receive() == [number]


def test_a_wrong_secret_is_refused_soon_and_not_shown(listener: socket.socket) -> None:
    """Soon is long before the time for the proof is over."""
    with ThreadPoolExecutor() as pool:
        launcher = pool.submit(lambda: Channel.accept(listener.accept()[0], SECRET, LIMIT_S))
        with pytest.raises(SecretRefused, match="refuses this secret") as at_node:
            Channel.connect("127.0.0.1", port_of(listener), OTHER, LIMIT_S)
        with pytest.raises(SecretRefused, match="does not know the run's secret") as at_launcher:
            launcher.result()
    said = f"{at_node.value}{at_launcher.value}"
    assert SECRET not in said
    assert OTHER not in said


def test_a_launcher_without_the_secret_is_not_believed(listener: socket.socket) -> None:
    def answer() -> None:
        connection = listener.accept()[0]
        with connection:
            connection.sendall(b"midstride nodes 1\n" + b"n" * 32)
            connection.recv(64)
            connection.sendall(b"p" * 32 + frames([{"job": "evil"}])[0])

    with ThreadPoolExecutor() as pool:
        pool.submit(answer)
        with pytest.raises(SecretRefused, match="does not know this secret"):
            Channel.connect("127.0.0.1", port_of(listener), SECRET)


#: what happens to three frames on their way -> how many arrive before the connection is given up
ON_THEIR_WAY: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "nothing": (lambda sent: sent, 3),
    "repeated": (lambda sent: [sent[0], sent[0]], 1),
    "reordered": (lambda sent: [sent[1], sent[0]], 0),
    "left out": (lambda sent: [sent[0], sent[2]], 1),
    "content changed": (lambda sent: [sent[0], sent[1].replace(b"one", b"]]]")], 1),
    "length changed": (lambda sent: [(len(sent[0]) - 37).to_bytes(4) + sent[0][4:-1]], 0),
    "absurd length": (lambda sent: [b"\xff" * 4 + sent[0][4:]], 0),
    "of the other end": (lambda sent: frames_of_launcher(), 0),
}


def frames_of_launcher() -> list[bytes]:
    here, there = socket.socketpair()
    with here, there:
        Channel(here, b"k" * 32, (b"launcher", b"node")).send("zero")
        return [there.recv(1 << 16)]


@pytest.mark.parametrize("name", ON_THEIR_WAY)
def test_what_happens_to_messages_on_their_way_is_noticed(name: str) -> None:
    change, arrive = ON_THEIR_WAY[name]
    sent = ["zero", "one", "two"]
    here, there = socket.socketpair()
    with here, there:
        here.sendall(b"".join(change(frames(sent))))
        launcher = Channel(there, b"k" * 32, (b"launcher", b"node"))
        assert [launcher.receive() for _ in range(arrive)] == sent[:arrive]
        if name != "nothing":
            with pytest.raises(MessageRefused, match="changed, repeated, left out or moved"):
                launcher.receive()


def test_a_recorded_conversation_convinces_nobody(listener: socket.socket) -> None:
    """Neither a launcher, if a node's side is played to it, nor a node, if a launcher's is."""
    recorded: dict[str, bytes] = {"node": b"", "launcher": b""}
    with socket.create_server(("127.0.0.1", 0)) as relay, ThreadPoolExecutor() as pool:

        def carry(source: socket.socket, target: socket.socket, who: str) -> None:
            while data := source.recv(1 << 16):
                recorded[who] += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

        def run_relay() -> None:
            with relay.accept()[0] as node, socket.create_connection(listener.getsockname()) as launcher:
                back = pool.submit(carry, launcher, node, "launcher")
                carry(node, launcher, "node")
                back.result()

        relayed = pool.submit(run_relay)
        launcher, node = pair(listener, port_of(relay))
        node.send({"host": "a", "cores": 1})
        assert launcher.receive() == {"host": "a", "cores": 1}, "relayed, and as it was sent"
        node.close()
        launcher.close()
        relayed.result()
        again = pool.submit(lambda: Channel.accept(listener.accept()[0], SECRET))
        with socket.create_connection(listener.getsockname()) as replayed:
            replayed.sendall(recorded["node"])
            with pytest.raises(SecretRefused):
                again.result()
        played = pool.submit(lambda: listener.accept()[0])
        connected = pool.submit(lambda: Channel.connect("127.0.0.1", port_of(listener), SECRET))
        with played.result() as fake:
            fake.sendall(recorded["launcher"])
            with pytest.raises(SecretRefused):
                connected.result()


def test_strangers_keep_no_node_away(listener: socket.socket, capfd: pytest.CaptureFixture[str]) -> None:
    connections = NodeConnections(listener, SECRET, {"job": {"name": "a"}, "store_port": 7})
    strangers = [socket.create_connection(listener.getsockname()) for _ in range(20)]
    for number, stranger in enumerate(strangers):
        stranger.sendall([b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04K\x01." * 64, b"\0" * 64, b""][number % 4])
    node = LauncherConnection("127.0.0.1", port_of(listener), SECRET)
    assert node.introduce("gpu07", 8) == {"node": 1, "job": {"name": "a"}, "store_port": 7}
    assert node.first_bits({"cpu": "AVX2"}) == {"cpu": "AVX2"}
    assert node.first_bits({"cpu": "AVX512"}) == {"cpu": "AVX2"}
    connections.publish(Plan(round=3, nodes=(1,)))
    assert node.report({"lines": ["loss 3"]}) == Plan(round=3, nodes=(1,))
    assert connections.receive() == [(1, {"host": "gpu07", "cores": 8}), (1, {"lines": ["loss 3"]})]
    said = capfd.readouterr().out
    assert said == "a connection from 127.0.0.1 was refused: it does not know the run's secret\n", "once for each host"
    for one in (*strangers, node, connections):
        one.close()


def test_a_message_is_verified_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    loads = json.loads
    [frame] = frames(["zero"])
    monkeypatch.setattr(json, "loads", lambda content: parsed.append(content) or loads(content))
    here, there = socket.socketpair()
    with here, there:
        here.sendall(frame.replace(b"zero", b"evil") + frame)
        launcher = Channel(there, b"k" * 32, (b"launcher", b"node"))
        with pytest.raises(MessageRefused):
            launcher.receive()
        assert parsed == []
        assert launcher.receive() == "zero"
