"""Bugs in strategies and launchers: what ranks exchange, and which process ends with which."""

from mutants.mutant import Mutant

__all__ = ["WORLDS"]

PLAIN = "laws/test_plain.py"
CHILDREN = "unit/processes/test_child_processes.py"
LAUNCHERS = "faults/test_launchers.py"

WORLDS = [
    Mutant(
        "ranks forget whether they share buffers",
        "engine/strategies/ddp.py",
        "self._wrapped.require_forward_param_sync = self._shares_buffers",
        "pass",
        "laws/test_resume.py::test_a_window_goes_on_with_the_buffers_of_each_rank",
    ),
    Mutant(
        "the order of gradients is not replayed",
        "engine/strategies/ddp.py",
        "range(2 if self._order else 0)",
        "range(0)",
        "laws/test_resume.py::test_every_kind_of_module_resumes[worse and worse-3]",
    ),
    Mutant(
        "the order of gradients is replayed once where the graph is static",
        "engine/strategies/ddp.py",
        "range(2 if self._order else 0)",
        "range(1 if self._order else 0)",
        "laws/test_strategies.py::test_every_strategy_resumes[ddp, static-3]",
    ),
    Mutant(
        "gradients are exchanged inside a window",
        "engine/strategies/ddp.py",
        '            return cast("AbstractContextManager[Any]", wrapped.no_sync())\n',
        "            pass\n",
        f"{PLAIN}::test_an_undisturbed_run_has_the_bits_of_the_plain_script[3-0.5-3]",
    ),
    Mutant(
        "gradients are added up, not averaged",
        "engine/strategies/torch_collective.py",
        "    flat /= size\n",
        "",
        f"{PLAIN}::test_a_pipeline_has_the_bits_of_the_script_on_one_device[4-1-0.5-options2]",
    ),
    Mutant(
        "gradients of parts are added in another order",
        "engine/strategies/replicas.py",
        "for replica in range(ctx.replicas):",
        "for replica in reversed(range(ctx.replicas)):",
        f"{PLAIN}::test_split_batches_have_the_bits_of_the_script_that_splits_by_hand[dp-1-4-1]",
    ),
    Mutant(
        "the buffers are those of the last replica",
        "engine/strategies/replicas.py",
        "_keep_buffers(module, made[0])",
        "_keep_buffers(module, made[-1])",
        f"{PLAIN}::test_split_batches_have_the_bits_of_the_script_that_splits_by_hand[dp-1-2-1]",
    ),
    Mutant(
        "a batch loses what its parts do not share evenly",
        "engine/strategies/batch_split.py",
        "lengths = [len(chunk) for chunk in torch.empty(samples).chunk(parts)]",
        "lengths = [samples // parts] * parts",
        "unit/strategies/test_batch_split.py::test_a_batch_is_cut_as_torch_cuts",
    ),
    Mutant(
        "a parameter lies in two stages",
        "engine/strategies/pipeline/balance.py",
        "cost < best[stage][end] and start not in tied and",
        "cost < best[stage][end] and",
        "unit/strategies/test_pipeline.py::test_layers_that_share_a_parameter_stay_together",
    ),
    Mutant(
        "a process outlives a parent that is killed",
        "engine/processes/lifetime.py",
        "    _prctl(_PR_SET_PDEATHSIG, by)\n",
        "",
        f"{LAUNCHERS}::test_the_watcher_ends[SIGKILL-inline]\nfaults/test_workers.py::test_a_worker_dies_with_its_rank",
    ),
    Mutant(
        "what a child prints is lost",
        "engine/processes/child_processes.py",
        "        sys.stdout.flush()\n        sys.stderr.flush()\n",
        "        pass\n",
        f"{CHILDREN}::test_what_a_process_prints_is_flushed",
    ),
    Mutant(
        "a child that left with a code has ended well",
        "engine/processes/child_processes.py",
        "code = end.code or 0",
        "code = 0",
        f"{CHILDREN}::test_how_a_process_ends",
    ),
    Mutant(
        "children that were started live on where the next one does not start",
        "engine/processes/child_processes.py",
        "            self._end()\n            raise\n",
        "            raise\n",
        f"{CHILDREN}::test_a_start_that_fails_ends_those_that_run",
    ),
    Mutant(
        "what a world leaves behind lives on",
        "engine/processes/supervisor.py",
        "        self._end_leftovers()\n",
        "",
        "faults/test_world_output.py::test_what_a_world_leaves_behind_at_its_own_end",
    ),
    Mutant(
        "deaf ranks are asked for ever",
        "engine/processes/supervisor.py",
        "if self._deadline is not None and time.monotonic() > self._deadline:",
        "if False:",
        f"{LAUNCHERS}::test_deaf_ranks_are_killed_after_the_grace[SIGKILL]",
    ),
    Mutant(
        "half a line is told",
        "engine/processes/supervised_process.py",
        "        if not ended:  # a progress",
        "        if False:  # a progress",
        "faults/test_world_output.py::test_output_comes_in_whole_lines",
    ),
]
