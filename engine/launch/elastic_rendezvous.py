"""Participants of a process group for torchrun's agents; on one machine, without a port."""

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from midstride.engine.processes.loopback import ADDRESS, free_port
from midstride.engine.strategies.torch_internals import HashStore

__all__ = ["OneMachine", "Rendezvous"]


class Rendezvous(RendezvousHandler):
    """Rendezvous that is not held by torchrun's agents.

    Derived classes name the participants.
    """

    #: name by which an agent finds it
    name = "midstride"

    def use(self) -> str:
        """Make agents of this process use this rendezvous; return torchrun's argument that names it."""
        rendezvous_handler_registry.register(self.name, lambda _: self)
        return f"--rdzv-backend={self.name}"

    def get_backend(self) -> str:
        """Return the name under which this handler is registered."""
        return self.name

    def num_nodes_waiting(self) -> int:
        """Return 0: no others come."""
        return 0

    def get_run_id(self) -> str:
        """Return a name for the logs of the agent."""
        return self.name

    def is_closed(self) -> bool:
        """Return False: the launcher ends the agents."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there are no others to tell."""

    def shutdown(self) -> bool:
        """Return True: there is nothing to close."""
        return True


class OneMachine(Rendezvous):
    """Rendezvous of this machine alone; torch's own reads pickles at a port."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a world of this agent."""
        for_others = RendezvousStoreInfo(ADDRESS, free_port())  # libraries look there for a rank
        return RendezvousInfo(HashStore(), 0, 1, for_others)
