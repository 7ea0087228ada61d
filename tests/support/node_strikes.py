"""What happens to nodes while all of them train, and how many train in the rounds from then on."""

import time
from collections.abc import Callable
from signal import SIGCONT, SIGSTOP
from socket import gethostname

from support.flow_runs import wait_for
from support.machines import TIMEOUT_S, Machines


def killed(machines: Machines) -> None:
    machines.nodes.pop(0).kill()
    machines.wait_for_fewer()


def replaced(machines: Machines) -> None:
    killed(machines)
    machines.join()
    machines.wait_for_all()


def frozen(machines: Machines) -> None:
    machines.nodes[0].signal(SIGSTOP)
    machines.wait_for_fewer()
    machines.nodes[0].signal(SIGCONT)
    machines.wait_for_all()


def leaves(machines: Machines) -> None:
    leaving = machines.nodes.pop(0)
    leaving.stop()
    machines.wait_for_fewer()
    assert leaving.wait() == 75, machines.said()


def all_suspended(machines: Machines) -> None:
    """Suspend launcher and nodes, ranks included, for longer than a node may be silent."""
    for machine in (machines.launcher, *machines.nodes):
        machine.signal(SIGSTOP)
    time.sleep(2 * TIMEOUT_S)
    for machine in (machines.launcher, *machines.nodes):
        machine.signal(SIGCONT)


def rank_killed(machines: Machines) -> None:
    machines.nodes[0].find("machines.rank")[0].kill()
    machines.wait_for_all()


def rank_suspended(machines: Machines) -> None:
    machines.nodes[0].find("machines.rank")[0].signal(SIGSTOP)
    machines.wait_for_all()


def launcher_killed(machines: Machines) -> None:
    machines.launcher.find("engine fit")[0].kill()
    machines.launcher.wait()
    machines.fit()
    machines.wait_for_all()


def stopped(machines: Machines) -> None:
    machines.launcher.find("engine fit")[0].terminate()
    assert machines.launcher.wait() == 75, machines.said()
    assert [node.wait() for node in machines.nodes] == [75] * machines.most, machines.said()
    machines.nodes.clear()
    machines.fit()
    for _ in range(machines.most):
        machines.join()
    machines.wait_for_all()


def powered_off(machines: Machines) -> None:
    machines.nodes.pop(0).power_off()
    machines.wait_for_fewer()


def cut(machines: Machines) -> None:
    machines.nodes[0].cut()
    machines.wait_for_fewer()
    wait_for(lambda: "has not answered for 30 s" in machines.said("node-1.txt"), "the node that is cut off to end")
    machines.nodes[0].heal()
    machines.wait_for_all()


def cut_and_healed(machines: Machines) -> None:
    machines.nodes[0].cut()
    machines.wait_for_fewer()
    machines.nodes[0].heal()
    machines.wait_for_all()


Strike = Callable[[Machines], None]
#: what happens while all nodes train -> whether all train in the rounds from then on, and the words of why
STRIKES: dict[Strike, tuple[list[bool], list[str]]] = {
    killed: ([True, False], ["was silent for 5 s: it is left out"]),
    replaced: ([True, False, True], ["was silent for 5 s: it is left out", "can train as well"]),
    frozen: ([True, False, True], ["was silent for 5 s: it is left out", "can train as well"]),
    all_suspended: ([True], []),
    leaves: ([True, False], ["leaves: asked to stop"]),
    rank_killed: ([True, True], ["ended without a word"]),
    rank_suspended: ([True, True], [f" on node {gethostname()}: suspended, by SIGSTOP"]),
    launcher_killed: ([True], []),
    stopped: ([True], []),
    powered_off: ([True, False], ["was silent for 5 s: it is left out"]),
    cut: ([True, False, True], ["was silent for 5 s: it is left out", "can train as well"]),
    cut_and_healed: ([True, False, True], ["was silent for 5 s: it is left out", "can train as well"]),
}
#: those after which there is another launcher, whose first round the first node may have alone
RESTARTED = (launcher_killed, stopped)
#: those that need cables
CABLED = (powered_off, cut, cut_and_healed)
