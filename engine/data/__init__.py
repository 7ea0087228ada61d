"""Data loaders that start at any batch: order and random numbers follow from the position.

accelerate_internals  tells Accelerate of a pass over a StatefulDataLoader, and of its end
attribute_fingerprint  a fast check that attributes have not changed, in place of a walk over the objects
bad_samples            samples whose reading raises an error, left out of their batches
batch_sampler_order    the batches of a batch sampler, dealt to the ranks in turn
combined               several loaders at once, read side by side or one after the other
data_check             finds map-style data that differ between ranks or attempts, by a few samples
data_owners            objects that hold data, such as data sets: described as nodes, and restored in place
dataloader_order       makes a user's map-style DataLoader resumable: the order of its samplers on this rank
drawn_items            items that a sampler gave for an epoch: held, digested, packed for snapshots
lane_loader            map-style loaders for runs in lanes: one batch for each lane of this rank at once
limits                 limits on the number of batches: a share of a loader's batches, or a number
loader                 `ResumableLoader`: base class of loaders that a loop can read from any batch of any epoch
map_style              map-style loaders that can start at any batch of an epoch
order                  the order of samples as a function of seed, epoch and position
permutation            permutations of an epoch's samples; large ones are computed at the positions that are read
read_side_effects      finds side effects of reading on data sets, which new workers and snapshots do not have
resolve                makes the user's training, validation, test and prediction loaders resumable
running_generator      generators that samplers made in `__init__`, as iterators whose items can be drawn again
sampler_order          orders given by a sampler, torch's or the user's: drawn at an epoch's start, shared by the ranks
sampler_state          the state of a sampler between epochs: counters, generators, or its own `state_dict`
seeded_dataset         wraps data set and collate_fn, so that each sample has random numbers of its own
stateful_loader        `StatefulDataLoader`: a DataLoader with `state_dict`, for training loops other than the Trainer's
torch_internals        private attributes of `torch.utils.data`, used in this file only
worker_data            the data of a loader as its workers have them: as of the start of a pass
worker_memory          the shared memory in which workers hand over batches: errors that say the way out
whole_loader           loaders of any other kind, such as generators and those of libraries, read as a whole
workers                starts a loader's workers, ends them with their rank, and reports lost ones
iterable/              iterable data sets, resumed by their own state or by reading again
rng/                   random numbers in the data, separate from the main process's generators

Tests: tests/unit/data, tests/laws/test_loaders.py, tests/laws/test_streams.py, tests/faults/test_workers.py
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstride.engine.data.stateful_loader import StatefulDataLoader

__all__ = ["StatefulDataLoader"]


def __getattr__(name: str) -> Any:
    if name != "StatefulDataLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from midstride.engine.data.stateful_loader import StatefulDataLoader  # imported late, since it needs torch

    return StatefulDataLoader
