"""Planted bugs of what the copies of data are made of that a pass reads."""

from mutants.mutant import Mutant

__all__ = ["COPIES"]

COPIES = [
    Mutant(
        "a stream that goes on has what training made of it since",
        "engine/data/iterable/loader.py",
        "self._data.as_begun(goes_on=goes_on)",
        "self._data.as_begun(goes_on=False)",
        "laws/test_objects.py::test_a_resumed_life_has_what_the_life_before_had[TellsStream]",
    ),
    Mutant(
        "shards of a stream are opened when they are read first",
        "engine/data/iterable/loader.py",
        "            if not workers and (failure",
        "            if False and (failure",
        "laws/test_objects.py::test_a_resumed_life_has_what_the_life_before_had[TellsShards]",
    ),
    Mutant(
        "a stream's worker_init_fn is what it was when training began",
        "engine/data/iterable/loader.py",
        "reader.set_functions(self.source.collate_fn, self.source.worker_init_fn)",
        "reader.set_functions(self.source.collate_fn, reader.init)",
        "unit/data/test_worker_data.py::test_a_worker_init_fn_that_is_set_anew_begins_the_next_epoch[Streamed]",
    ),
    Mutant(
        "workers that stay begin anew with what was set between epochs",
        "engine/data/worker_data.py",
        "            self._start = copy.deepcopy(self.nodes())\n",
        "            pass\n",
        "unit/data/test_worker_data.py::test_workers_that_stay_have_in_every_epoch_what_they_began_with",
    ),
    Mutant(
        "workers that had not begun have what the data held when the run was resumed",
        "engine/data/worker_data.py",
        "if self._has_begun and self._start is None",
        "if self._start is None",
        "unit/data/test_worker_data.py::test_workers_that_had_not_begun_begin_with_what_data_hold",
    ),
    Mutant(
        "loaders are not told that a state is back",
        "engine/training/checkpointing/checkpointer.py",
        "            self._context.loaders.restored()\n",
        "",
        "laws/test_objects.py::test_workers_that_stay_have_what_they_began_with_where_an_epoch_ended",
    ),
    Mutant(
        "a stream that is read itself is put back when its pass begins",
        "engine/data/iterable/loader.py",
        "                self._data.leave_data()\n",
        "                pass\n",
        "unit/data/test_worker_data.py::test_a_stream_that_cannot_be_copied_says_nothing_of_how_it_began",
    ),
    Mutant(
        "what a worker remembers of its reading is not looked at",
        "engine/data/seeded_dataset.py",
        "            self.seeds.check_memory(fetch, batch, self.collate, single=self.single)\n",
        "",
        "laws/test_objects.py::test_what_cannot_come_back_is_named_in_the_first_life[data that remember, in a worker]",
    ),
    Mutant(
        "what a worker counts is not named",
        "engine/data/read_memory.py",
        "        return lines[0] if lines else None",
        "        return None",
        "unit/data/test_worker_data.py::test_data_that_count_their_readings_in_workers_are_named_once",
    ),
    Mutant(
        "what is read twice here is counted twice",
        "engine/data/map_style.py",
        "        memory.fill(before)\n        return collate(dataset.__getitems__(request._replace(probe=0)))",
        "        return batch",
        "unit/data/test_worker_data.py::test_what_is_read_twice_in_the_main_process_is_counted_once",
    ),
    Mutant(
        "the first worker has the first batch of a pass that goes on",
        "engine/data/map_style.py",
        "self._sampler.idle = before % self._loader.num_workers if self._loader.num_workers else 0",
        "self._sampler.idle = 0",
        "unit/data/test_worker_data.py::test_a_batch_is_read_by_the_worker_that_it_has_in_a_whole_epoch",
    ),
    Mutant(
        "a list that is a sampler has no state",
        "engine/data/sampler_state.py",
        "                copy_into(self._sampler, value)\n",
        "                pass\n",
        "laws/test_objects.py::test_a_resumed_life_has_what_the_life_before_had[Ordered]",
    ),
    Mutant(
        "a pass goes on with the collate_fn that training has set",
        "engine/data/worker_data.py",
        "return live if self._copies else MISSING",
        "return live",
        "laws/test_objects.py::test_a_resumed_life_has_what_the_life_before_had[Recollated]",
    ),
    Mutant(
        "workers read a list as training has changed it since the epoch began",
        "engine/data/worker_data.py",
        "if is_value(loader.dataset) else own",
        "if False else own",
        "laws/test_objects.py::test_a_resumed_life_has_what_the_life_before_had[RelabelsForWorkers]",
    ),
    Mutant(
        "workers are given the module, whether they read it or not",
        "engine/data/map_style.py",
        "module if is_held else None",
        "module",
        "laws/test_loaders.py::test_workers_that_are_not_forked",
    ),
    Mutant(
        "identity is asked of the attributes alone",
        "engine/data/identity_record.py",
        "all(map(self._enter, parts or ()))",
        "True",
        "unit/data/test_identity_record.py::test_what_has_changed_is_not_said_to_be_as_it_was",
    ),
    Mutant(
        "what is small and changes in place counts as unchanged",
        "engine/data/identity_record.py",
        "(is_large(value) if parts is None",
        "(True if parts is None",
        "unit/data/test_identity_record.py::test_of_what_changes_unseen_nothing_is_said",
    ),
]
