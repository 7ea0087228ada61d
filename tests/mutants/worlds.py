"""Bugs in strategies and launchers: what ranks exchange, and which process ends with which."""

from mutants.mutant import Mutant

__all__ = ["WORLDS"]

PLAIN = "laws/test_plain.py"
CHILDREN = "unit/processes/test_child_processes.py"
LAUNCHERS = "faults/test_launchers.py"
ROUNDS = "unit/launch/test_rounds.py"

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
        "gradients of chunks are added in another order",
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
        "a batch loses what its chunks do not share evenly",
        "engine/strategies/batch_split.py",
        "lengths = [len(chunk) for chunk in torch.empty(samples).chunk(chunks)]",
        "lengths = [samples // chunks] * chunks",
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
        "what a fork server started lives on",
        "engine/processes/lifetime.py",
        "        die_with_parent(process)\n    else:\n        exit_with(process)\n",
        "        die_with_parent(process)\n",
        f"{CHILDREN}::test_they_end_when_the_process_that_started_them_is_killed[forkserver]",
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
    Mutant(
        "a module that is cut comes to its device whole",
        "engine/strategies/sharded.py",
        "        whole = uncut_tensors(submodule)\n",
        "        whole = [*submodule.parameters()] if isinstance(submodule, TrainingModule) else []\n",
        "distributed/test_sharded.py::test_a_device_never_has_more_than_one_part_whole",
    ),
    Mutant(
        "replicas are cut anew as if each rank had other rows",
        "engine/strategies/sharded.py",
        "reshard_rows(states, rank % self._shards, self._shards)",
        "reshard_rows(states, rank, self._shards)",
        "distributed/test_sharded.py::test_row_shards_are_cut_anew_for_another_world_bit_for_bit",
    ),
    Mutant(
        "batch norm is gathered in 16 bits",
        "engine/strategies/sharded.py",
        "norms = norms_of(module) if self._param_dtype else {}",
        "norms: dict[nn.Module, None] = {}",
        f"{PLAIN}::test_options_of_sharded_training_have_the_bits_of_the_script_around_fully_shard[bf16]",
    ),
    Mutant(
        "a node that is silent stays in its round",
        "engine/launch/nodes/rounds.py",
        "            if self.is_silent(node):\n",
        "            if False:\n",
        f"{ROUNDS}::test_a_silent_node_is_left_out_and_one_that_waits_takes_its_part",
    ),
    Mutant(
        "a round begins with a number of nodes that cannot share the lanes",
        "engine/launch/nodes/rounds.py",
        "count = self.machines.training(len(ready))\n",
        "count = len(ready)\n",
        f"{ROUNDS}::test_a_number_that_cannot_share_the_lanes_leaves_one_waiting",
    ),
    Mutant(
        "a round grows before it has trained",
        "engine/launch/nodes/rounds.py",
        "self._clock() - since >= grow_s",
        "True",
        f"{ROUNDS}::test_a_round_grows_when_it_has_trained_for_a_while",
    ),
    Mutant(
        "a node that ended many rounds is let in again and again",
        "engine/launch/nodes/rounds.py",
        "good = [node for node in waiting if not self.is_blamed(node)]\n",
        "good = waiting\n",
        f"{ROUNDS}::test_a_node_that_ended_two_rounds_waits_while_there_are_enough_without_it",
    ),
    Mutant(
        "ranks that are done stop the others",
        "engine/launch/nodes/rounds.py",
        "node.is_ready and not node.is_done",
        "node.is_ready",
        f"{ROUNDS}::test_ranks_that_are_done_let_the_others_come_to_the_end_too",
    ),
    Mutant(
        "a notice of preemption is read as none",
        "engine/launch/preemption.py",
        'if event["EventType"] == "Preempt"',
        'if event["EventType"] == "Terminate"',
        "unit/launch/test_preemption.py::test_a_notice_is_read_as_the_cloud_words_it[azure]",
    ),
    Mutant(
        "nodes are told how many threads the launcher has",
        "engine/launch/schedulers/base.py",
        'SignalRequests.VARIABLE, "OMP_NUM_THREADS", ',
        "SignalRequests.VARIABLE, ",
        "unit/launch/test_schedulers.py::test_nodes_are_not_told_what_is_for_this_machine_alone",
    ),
    Mutant(
        "jobs in the queue outlive their launcher",
        "engine/launch/schedulers/slurm.py",
        '_run(["scancel", self._job], _environment())',
        "pass",
        "distributed/test_slurm.py::test_a_job_in_the_queue_is_no_hang_and_is_cancelled_on_a_stop",
    ),
]
