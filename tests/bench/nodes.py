"""How soon a world of two machines goes on when one is lost: machines in network namespaces; needs root."""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.flow_runs import tiny_job, wait_for
from support.machines import Machine, Machines
from support.networks import Network, why_no_network


def kill_rank(node: Machine) -> None:
    """Kill a rank."""
    node.find("machines.rank")[0].kill()


def kill_agent(node: Machine) -> None:
    """Kill torchrun's agent, and the command that has started it."""
    for process in (*node.find("engine join"), *node.find("machines.agent")):
        process.kill()


#: what is done to one of two machines
FAULTS: dict[str, Callable[[Machine], None]] = {
    "rank killed": kill_rank,
    "agent killed": kill_agent,
    "power-off": Machine.power_off,
    "cable cut": Machine.cut,
    "asked to leave": Machine.stop,
}


class Journey:
    """What the launcher's log and session tell, as it comes.

    Args:
        machines: that train.
    """

    def __init__(self, machines: Machines) -> None:
        self._machines = machines

    def rounds(self) -> int:
        """Return how many rounds have begun."""
        return self._machines.said("fit.txt").count("\nround ") - self._machines.said("fit.txt").count(" has ended: ")

    def steps(self) -> Iterator[float]:
        """Yield when each step was reported, in seconds since the epoch."""
        for path in self._machines.folder.glob("tmp/midstride-a-*/events.jsonl"):
            for line in path.read_text().splitlines():
                if (event := json.loads(line))["kind"] == "step":
                    yield event["time"]


def measured(fault: str, folder: Path, network: Network) -> tuple[float, float]:
    """Return seconds from the fault to the next round, and to its first step."""
    (folder / "tmp").mkdir(parents=True)
    os.environ["TMPDIR"] = str(folder / "tmp")  # where the launcher has its session
    tiny_job(folder, steps=100_000, slow_rank=0)
    machines = Machines(folder, network)
    try:
        machines.fit(lanes=4)  # which grows at once: the first round may have one machine
        for number in (1, 2):
            machines.join(number)
        machines.wait_for_round(2)
        journey = Journey(machines)
        wait_for(lambda: [*journey.steps()], "a step")
        rounds, struck = journey.rounds(), time.time()
        FAULTS[fault](machines.nodes[0])
        while journey.rounds() == rounds:
            time.sleep(0.01)
        again = time.time()
        return again - struck, wait_for(lambda: [at for at in journey.steps() if at > again], "a step")[0] - struck
    finally:
        machines.close()
        network.heal(1)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    times = parser.parse_args().times
    if why := why_no_network():
        raise SystemExit(why)
    print("| fault | next round after | its first step after |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="bench-nodes-") as folder, Network(3) as network:
        for fault in FAULTS:
            found = [measured(fault, Path(folder, f"{fault} {time}"), network) for time in range(times)]
            rounds, steps = (statistics.median(column) for column in zip(*found, strict=True))
            print(f"| {fault} | {rounds:.1f} s | {steps:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
