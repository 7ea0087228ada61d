"""What happens to nodes while two of them train, and how many train in the rounds from then on."""

from collections.abc import Callable
from signal import SIGCONT, SIGSTOP
from socket import gethostname

from support.flow_runs import wait_for
from support.machines import Machines

__all__ = ["CABLED", "STRIKES", "Strike", "killed", "launcher_killed", "rank_suspended"]


def killed(machines: Machines) -> None:
    machines.nodes.pop(0).kill()
    machines.wait_for_round(ranks=1)


def replaced(machines: Machines) -> None:
    killed(machines)
    machines.join()
    machines.wait_for_round(ranks=2)


def frozen(machines: Machines) -> None:
    machines.nodes[0].signal(SIGSTOP)
    machines.wait_for_round(ranks=1)
    machines.nodes[0].signal(SIGCONT)
    machines.wait_for_round(ranks=2)


def leaves(machines: Machines) -> None:
    leaving = machines.nodes.pop(0)
    leaving.stop()
    machines.wait_for_round(ranks=1)
    assert leaving.wait() == 75, machines.said()


def rank_killed(machines: Machines) -> None:
    machines.nodes[0].find("nodes.rank")[0].kill()
    machines.wait_for_round(ranks=2)


def rank_suspended(machines: Machines) -> None:
    machines.nodes[0].find("nodes.rank")[0].signal(SIGSTOP)
    machines.wait_for_round(ranks=2)


def launcher_killed(machines: Machines) -> None:
    machines.launcher.find("engine fit")[0].kill()
    machines.launcher.wait()
    machines.fit()
    machines.wait_for_round(ranks=2)


def stopped(machines: Machines) -> None:
    machines.launcher.find("engine fit")[0].terminate()
    assert machines.launcher.wait() == 75, machines.said()
    assert [node.wait() for node in machines.nodes] == [75, 75], machines.said()
    machines.nodes.clear()
    machines.fit()
    machines.join()
    machines.join()
    machines.wait_for_round(ranks=2)


def powered_off(machines: Machines) -> None:
    machines.nodes.pop(0).power_off()
    machines.wait_for_round(ranks=1)


def cut(machines: Machines) -> None:
    machines.nodes[0].cut()
    machines.wait_for_round(ranks=1)
    wait_for(lambda: "has not answered for 30 s" in machines.said("node-1.txt"), "the node that is cut off to end")
    machines.nodes[0].heal()
    machines.wait_for_round(ranks=2)


def cut_and_healed(machines: Machines) -> None:
    machines.nodes[0].cut()
    machines.wait_for_round(ranks=1)
    machines.nodes[0].heal()
    machines.wait_for_round(ranks=2)


Strike = Callable[[Machines], None]
#: what happens while two nodes train -> how many train in the rounds from then on, and the words of why
STRIKES: dict[Strike, tuple[list[int], list[str]]] = {
    killed: ([2, 1], ["was silent for 5 s: it is left out"]),
    replaced: ([2, 1, 2], ["was silent for 5 s: it is left out", "can train as well"]),
    frozen: ([2, 1, 2], ["was silent for 5 s: it is left out", "can train as well"]),
    leaves: ([2, 1], ["leaves: asked to stop"]),
    rank_killed: ([2, 2], ["ended without a word"]),
    rank_suspended: ([2, 2], [f"The others wait for rank 0 on node {gethostname()}: suspended, by SIGSTOP"]),
    launcher_killed: ([2], []),
    stopped: ([2, 2], [""]),
    powered_off: ([2, 1], ["was silent for 5 s: it is left out"]),
    cut: ([2, 1, 2], ["was silent for 5 s: it is left out", "can train as well"]),
    cut_and_healed: ([2, 1, 2], ["was silent for 5 s: it is left out", "can train as well"]),
}
#: those that need cables
CABLED = (powered_off, cut, cut_and_healed)
