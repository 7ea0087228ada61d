"""Data: orders that are functions, random numbers that are functions, loaders that start anywhere.

base_seed         the number that a DataLoader draws from its generator ahead of a sampler that shares it
combined          several loaders at once: what a user writes, and the loader that reads them side by side or
                  one after the other
data_owners       what a data set, and what reads it, hold: taken as nodes, and put back in place
dataloader_order  how a user's DataLoader is read: which order its samplers mean, on this rank of this world
in_place_copy     values that become equal to others and stay the objects they are, so that what is shared
                  stays shared
items             the items of an epoch as a snapshot holds them: arrays where they are numbers or lists of
                  numbers
lane_loader       map-style loaders of runs in lanes: a batch of every lane of this rank at once
lane_order        the order of samples in lanes: one order a lane, read side by side
limits            how many batches a limit leaves: a share of a loader's batches, or a number of them
loader            what a loop reads: batches from any position of any epoch, and what decides their order
map_style         map-style loaders that start anywhere in an epoch and give the same batches as if they had
                  come there by walking
order             the order of samples as a function of (seed, epoch, position): nothing to remember, nothing
                  to replay
pass_collate      the collate_fn that a pass goes on with, beside the one that training has set since
permutation       permutations of an epoch's samples: small ones drawn at once, large ones computed where they
                  are read
quick_look        a look at attributes that tells, in a fraction of the time of a walk, that nothing in them
                  has changed
read_memory       what reading leaves behind in data: a worker that is started anew begins without it, and no
                  snapshot holds it
resolve           a fit's loaders: the user's, each made resumable
sampler_order     orders that a sampler of torch or of the user decides: drawn whole at an epoch's start, then
                  shared by the ranks
sampler_state     what a sampler carries from one epoch to the next: its counters, its generators, or what it
                  says itself
seeded_dataset    the user's data set and collate, each given its own random numbers by where it stands in the
                  epoch
stateful_loader   a DataLoader with a state, for loops that are not the Trainer's
torch_internals   privates of `torch.utils.data`, named here alone
worker_data       the data of a loader as its workers have them: as they were when the workers were started
workers           workers of a loader: started as the user wants, tied to their rank, and told apart when one
                  is lost
iterable/         streams that go on where they were, by their state or by reading again
rng/              functions of where a sample stands, and the main process's left as they were
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstride.engine.data.stateful_loader import StatefulDataLoader

__all__ = ["StatefulDataLoader"]


def __getattr__(name: str) -> Any:
    if name != "StatefulDataLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from midstride.engine.data.stateful_loader import StatefulDataLoader  # only who asks for it needs torch

    return StatefulDataLoader
