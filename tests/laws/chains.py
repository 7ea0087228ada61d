"""Chains of deaths: one run that dies at every step, each time in another phase, and lives on from each death."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from laws.lives import LAYOUTS, STEPS

from midstride.engine.fault_injection import PHASES, FaultPlan

RANKS = (1, 2, 3)
#: optimizer steps where there are fewer than batches
FEWER_STEPS = {"accumulation": 4}


@dataclass(frozen=True)
class Death:
    """Where a rank is killed.

    Args:
        layout: of the run.
        ranks: of its world.
        rank: that is killed,
        step: after so many steps,
        phase: when it reaches this next.
    """

    layout: str
    ranks: int
    rank: int
    step: int
    phase: str


@dataclass(frozen=True)
class Chain:
    """The deaths of one run: at least one at every step; at the last one two.

    Args:
        ranks: of its world, which take turns in dying.
        layout: of the run.
        rotation: the phase of the first death, as its number in `PHASES`; at each later step it is the next phase.
    """

    ranks: int
    layout: str
    rotation: int

    def __str__(self) -> str:
        return f"{self.ranks}-{self.layout.replace(' ', '_')}-{self.rotation}"

    @property
    def deaths(self) -> Iterator[Death]:
        steps = FEWER_STEPS.get(self.layout, STEPS)
        in_each_step = STEPS // steps
        for number in [*range(STEPS), STEPS - 1]:
            step, nth = divmod(number, in_each_step)
            phase = PHASES[(self.rotation + step + nth * len(PHASES) // in_each_step) % len(PHASES)]
            yield Death(self.layout, self.ranks, number % self.ranks, step, phase)

    def add_to(self, plan: FaultPlan) -> FaultPlan:
        """Let `plan` kill the run there."""
        for death in self.deaths:
            plan.add("kill", rank=death.rank, step=death.step, phase=death.phase)
        return plan


def pairs(chains: Iterable[Chain]) -> set[Any]:
    """Return every two values (a layout and a phase, a step and a rank, ...) that meet in a death."""
    deaths = (death for chain in chains for death in chain.deaths)
    return {pair for death in deaths for pair in itertools.combinations(vars(death).items(), 2)}


#: every phase at every step, whatever the layout and the number of ranks
PRODUCT = [Chain(*axes) for axes in itertools.product(RANKS, LAYOUTS, range(len(PHASES)))]
#: each layout with each number of ranks once, with rotations by which every two values meet
COVER = [
    Chain(ranks, layout, 3 * i + j if layout not in FEWER_STEPS else i)
    for (i, ranks), (j, layout) in itertools.product(enumerate(RANKS), enumerate(LAYOUTS))
]
