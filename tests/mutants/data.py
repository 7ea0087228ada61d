"""Bugs in what is read: order, place, random numbers, workers."""

from mutants.mutant import Mutant

__all__ = ["DATA"]

ORDER = "unit/test_order.py"
COMBINED = "unit/test_combined.py"
SAMPLERS = "unit/test_samplers.py"

DATA = [
    Mutant(
        "samples have the same random numbers in every epoch",
        "engine/data/map_style.py",
        "mix(self.key, self.epoch)",
        "mix(self.key, 0)",
        "unit/test_random.py::test_batches_are_functions_of_their_place",
    ),
    Mutant(
        "a pass goes on one batch late",
        "engine/data/map_style.py",
        "self._places.epoch, self._places.start, self._places.count = epoch, start, count",
        "self._places.epoch, self._places.start, self._places.count = epoch, start + (start > 0), count",
        "unit/test_random.py::test_batches_are_functions_of_their_place",
    ),
    Mutant(
        "workers are seeded by the main generator",
        "engine/data/map_style.py",
        "generator=torch.Generator().manual_seed(key),",
        "generator=None,",
        "unit/test_random.py::test_workers_start_alike_wherever_the_main_generators_stand",
    ),
    Mutant(
        "a worker outlives its rank",
        "engine/data/workers.py",
        "            die_with_parent(self.rank_pid)",
        "            pass",
        "faults/test_workers.py::test_a_worker_dies_with_its_rank",
    ),
    Mutant(
        "every epoch has the same order",
        "engine/data/order.py",
        "permutation(len(self), self._seed + epoch)",
        "permutation(len(self), self._seed)",
        ORDER,
    ),
    Mutant(
        "the place of a sample is that of its neighbour",
        "engine/data/order.py",
        "place = batch * self.global_batch_size + self.rank",
        "place = batch * self.global_batch_size + self.rank + 1",
        "unit/test_random.py::test_another_number_of_ranks_reads_the_same_samples\nunit/test_order.py",
    ),
    Mutant(
        "what was to be dropped is padded",
        "engine/data/order.py",
        'return -(-samples // self.size) if self.rest == "padded" else samples // self.size',
        "return -(-samples // self.size)",
        f"{ORDER}::test_training_order_is_that_of_distributed_sampler",
    ),
    Mutant(
        "a computed permutation ends beyond the data",
        "engine/data/permutation.py",
        "beyond = beyond[found[beyond] >= self._samples]",
        "beyond = beyond[:0]",
        ORDER,
    ),
    Mutant(
        "a computed permutation has no seed",
        "engine/data/permutation.py",
        "mix(seed, number) for number",
        "mix(0, number) for number",
        ORDER,
    ),
    Mutant(
        "a loader that starts over repeats its order",
        "engine/data/combined.py",
        "self.feed.batches(self.first + self.lap, self.position)",
        "self.feed.batches(self.first, self.position)",
        COMBINED,
    ),
    Mutant(
        "the shortest loader does not end an epoch",
        "engine/data/combined.py",
        'return any(ended) if self.mode == "min_size" else all(ended)',
        "return all(ended)",
        COMBINED,
    ),
    Mutant(
        "loaders of unknown length start over in each life",
        "engine/data/combined.py",
        "            if start:\n                return self._streams\n",
        "",
        COMBINED,
    ),
    Mutant(
        "collate has the random numbers of the first sample",
        "engine/data/rng/per_sample.py",
        "seed = mix(fetch.key ^ _COLLATE, fetch.first)",
        "seed = mix(fetch.key, fetch.first)",
        "unit/test_random.py",
    ),
    Mutant(
        "samples of a batch have the same random numbers",
        "engine/data/rng/per_sample.py",
        "self._seed(mix(fetch.key, fetch.first + number * fetch.stride), held)",
        "self._seed(mix(fetch.key, fetch.first), held)",
        "unit/test_random.py",
    ),
    Mutant(
        "what a sampler shares is replaced by copies",
        "engine/data/in_place.py",
        "if isinstance(live, kind) and fill(live, saved):",
        "if isinstance(live, kind) and fill(copy.deepcopy(live), saved) is None:",
        SAMPLERS,
    ),
    Mutant(
        "an epoch that is resumed is drawn again",
        "engine/data/sampler_order.py",
        "            self._run_again(epoch)",
        "            self._items = self._run(self._sampler, epoch)",
        SAMPLERS,
    ),
    Mutant(
        "a state is trusted that was not tried",
        "engine/data/iterable/trial.py",
        "_refused(open_, note, walk.digests)) is not None:",
        "_refused(open_, note, walk.digests[:0])) is not None:",
        "unit/test_iterable.py::test_a_state_that_does_not_bring_the_stream_back_is_named_and_not_used",
    ),
    Mutant(
        "states are taken after the last one that passed",
        "engine/data/iterable/shard.py",
        "if not self.due <= self.position <= self.states:",
        "if not self.due <= self.position:",
        "unit/test_iterable.py::test_a_state_that_does_not_bring_the_stream_back_is_named_and_not_used",
    ),
    Mutant(
        "a state that passed is left for the start",
        "engine/data/iterable/trial.py",
        "        trial.passed = note.batch\n",
        "",
        "unit/test_iterable.py::test_a_state_that_does_not_bring_the_stream_back_is_named_and_not_used",
    ),
    Mutant(
        "a state after which nothing was read passes",
        "engine/data/iterable/trial.py",
        "if note.batch < len(walk.digests)]",
        "if note.batch <= len(walk.digests)]",
        "unit/test_iterable.py::test_a_state_after_which_nothing_was_read_has_not_passed",
    ),
    Mutant(
        "what a stream gives again is not compared",
        "engine/data/iterable/shard.py",
        "if None not in (ask.digest, self.digest) and self.digest != ask.digest:",
        "if ask.digest is None and self.digest is not None:",
        "unit/test_iterable.py::test_data_that_changed_under_a_run_are_refused",
    ),
]
