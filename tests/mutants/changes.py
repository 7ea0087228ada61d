"""Bugs in what changes on the way: late metrics, groups of optimizers, dropped snapshots, what a launcher started."""

from mutants.mutant import Mutant

__all__ = ["CHANGES"]

KEPT = "laws/test_objects.py::test_a_resumed_life_has_what_the_life_before_had"

CHANGES = [
    Mutant(
        "what is logged at the end of an epoch weighs as much as the batch that was last",
        "engine/training/loops.py",
        "        context.metric_logger.begin_batch(None)\n        with context.heartbeat",
        "        with context.heartbeat",
        f"{KEPT}[LogsWithoutValidation]",
    ),
    Mutant(
        "what is logged at the end of a validation weighs as much as the batch that was last",
        "engine/training/loops.py",
        "        context.metric_logger.begin_batch(None)\n        if hooks.has",
        "        if hooks.has",
        f"{KEPT}[LogsAtEnd]",
    ),
    Mutant(
        "an attempt that goes on behind an epoch's last batch says that it was not the last",
        "engine/training/loops.py",
        "loader.stand_at_end(self.progress.at_end)",
        "loader.stand_at_end(False)",
        f"{KEPT}[AsksForLast]",
    ),
    Mutant(
        "when an epoch has ended, its last batch is still in hand",
        "engine/training/loops.py",
        "        self.loader.stand_at_end(False)\n",
        "",
        f"{KEPT}[AsksForLast]",
    ),
    Mutant(
        "metrics that the code makes late are no state",
        "engine/metrics/torchmetrics_state.py",
        'often it was updated."""\n        self._look_up()\n',
        'often it was updated."""\n',
        f"{KEPT}[MeasuresLate]",
    ),
    Mutant(
        "a metric that took another's place is not met",
        "engine/metrics/torchmetrics_state.py",
        "if self._found.get(path) is not metric}",
        "if path not in self._found}",
        f"{KEPT}[MeasuresAnew]",
    ),
    Mutant(
        "a lane's part of a metric that came up late is forgotten without a word",
        "engine/metrics/lane_metrics.py",
        "            if self._seen:\n",
        "            if False:\n",
        "unit/training/test_lane_refusals.py",
    ),
    Mutant(
        "a group that training took from an optimizer is there again",
        "engine/optim/trained_parameters.py",
        "if len(names) < self.groups:",
        "if False:",
        f"{KEPT}[TakesAway]",
    ),
    Mutant(
        "the defaults of an optimizer are as built",
        "engine/training/checkpointing/roots.py",
        'frozenset({"state", "param_groups", "step", "zero_grad"})',
        'frozenset({"state", "param_groups", "defaults", "step", "zero_grad"})',
        f"{KEPT}[Defaulting]",
    ),
    Mutant(
        "every attempt asks anew whether the loss trains anything, of a step that may have left its gradients out",
        "engine/training/optimizer_step.py",
        "len(context.optimizers) == 1 and context.progress.step == 0",
        "len(context.optimizers) == 1",
        f"{KEPT}[SkipsGradients]",
    ),
    Mutant(
        "a buffer that a bad batch put in another's place stays",
        "engine/training/nonfinite.py",
        "                    owned[name] = buffer  # a step may have put another in its place\n",
        "",
        "laws/test_on_nan.py::test_a_bad_batch_moves_nothing",
    ),
    Mutant(
        "rows that a dropped snapshot had go into every later one",
        "engine/snapshots/writer.py",
        "            self._dropped.clear()\n",
        "",
        "unit/storage/test_s3.py::test_a_snapshot_is_dropped_when_patience_ends_and_what_only_it_had_goes_into_the_next",
    ),
    Mutant(
        "where a snapshot was dropped none is taken any more",
        "engine/snapshots/writer.py",
        " and not self._was_dropped(self._last)",
        "",
        "unit/snapshots/test_writer.py::test_where_a_snapshot_was_dropped_one_is_taken_anew_and_once",
    ),
    Mutant(
        "a snapshot that is taken anew where one was dropped loses its files",
        "engine/snapshots/committer.py",
        "            if old != name:\n",
        "            if True:\n",
        "unit/snapshots/test_writer.py::test_where_a_snapshot_was_dropped_one_is_taken_anew_and_once",
    ),
    Mutant(
        "rows of a snapshot that was dropped twice are those of the second time",
        "engine/snapshots/writer.py",
        "request.rows if before is None else join_segments([before, request.rows])",
        "request.rows",
        "unit/snapshots/test_writer.py::test_where_a_snapshot_was_dropped_one_is_taken_anew_and_once",
    ),
    Mutant(
        "a view that stands for other values than its memory has is kept as what it shares it with",
        "engine/state/codec.py",
        "tensor = tensor.resolve_conj().resolve_neg()",
        "tensor = tensor.resolve_conj()",
        "unit/state/test_tensors.py",
    ),
    Mutant(
        "a client's error that came from no answer is not waited for",
        "engine/storage/retry.py",
        "        link = link.__cause__",
        "        link = None",
        "unit/storage/test_retry.py",
    ),
    Mutant(
        "what horovodrun started meets as ddp",
        "engine/ranks/placement.py",
        'return "horovod" if world.launcher == "horovodrun" else "ddp"',
        'return "ddp"',
        "unit/ranks/test_placement.py",
    ),
    Mutant(
        "each process of a script chooses free GPUs of its own",
        "engine/ranks/devices.py",
        "if chosen := hardware.environment.get(World.STARTED):",
        "if chosen := None:",
        "unit/ranks/test_placement.py",
    ),
    Mutant(
        "where some GPUs are hidden, all ranks take the first of the others",
        "engine/ranks/devices.py",
        "return hardware.gpus == 1 and hidden",
        "return hidden",
        "unit/ranks/test_placement.py",
    ),
    Mutant(
        "half a line of an event is skipped a byte at a time",
        "engine/session/events.py",
        "self._offset += len(whole) + len(newline)",
        "self._offset += len(whole) + 1",
        "unit/session/test_outcome.py",
    ),
    Mutant(
        "the state of one kind of optimizer is given to another",
        "engine/training/checkpointing/settings.py",
        "        if before != now:\n",
        "        if False:\n",
        "unit/training/test_settings.py",
    ),
]
