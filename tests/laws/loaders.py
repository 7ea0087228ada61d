"""The loaders under the laws, one row each."""

from laws.lives import SampleData
from laws.loaded import (
    AskedByLists,
    Batched,
    Bucketed,
    Distributed,
    Held,
    Hidden,
    InOrder,
    Loaded,
    OwnGenerator,
    OwnIterator,
    Part,
    Persistent,
    RandomCollate,
    Replaced,
    Reseeded,
    SaysItself,
    ToldTheEpoch,
    Unbatched,
    Weighted,
    WeightedByGenerator,
)
from laws.mining import HardestFirst, Mined, ReadsTheModule

#: name -> data module; it is made with the number of ranks and of workers
LOADERS: dict[str, type[SampleData]] = {
    "shuffled": Loaded,
    "in order, the last batch dropped": InOrder,
    "shuffled by a generator of its own": OwnGenerator,
    "with replacement": Replaced,
    "weighted": Weighted,
    "weighted, a generator of its own": WeightedByGenerator,
    "a random subset": Part,
    "a distributed sampler": Distributed,
    "a sampler with hidden state": Hidden,
    "a sampler that is told the epoch": ToldTheEpoch,
    "a sampler that is its own iterator": OwnIterator,
    "a sampler that says its state": SaysItself,
    "a batch sampler of its own": Bucketed,
    "torch's batch sampler around another": Batched,
    "no batches": Unbatched,
    "no batches, asked by lists": AskedByLists,
    "random collate": RandomCollate,
    "generators that the data hold": Held,
    "a hook that reseeds": Reseeded,
    "persistent workers": Persistent,
    "weights that training writes": Mined,
    "losses that training keeps": HardestFirst,
    "a sampler that reads the module": ReadsTheModule,
}
