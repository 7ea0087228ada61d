"""Bugs in strategy ddp: what it replays, what it refuses, what it leaves on a module, what comes back from ranks."""

from mutants.mutant import Mutant

__all__ = ["DDP"]

LOOKED = "laws/test_resume.py::test_every_kind_of_module_resumes[sparse and complex-3]"

DDP = [
    Mutant(
        "layers that were made in the ranks do not come back",
        "engine/modules/structure.py",
        "if not _fits(module, weights):",
        "if False:",
        "distributed/test_starting.py::test_layers_that_hooks_make_in_the_ranks_come_back",
    ),
    Mutant(
        "classes that the ranks alone have imported are not to be found",
        "engine/modules/structure.py",
        'import_module(made.kind.partition(":")[0])',
        "pass",
        "distributed/test_starting.py::test_layers_that_hooks_make_in_the_ranks_come_back",
    ),
    Mutant(
        "ddp replays dense gradients where they are sparse",
        "engine/strategies/ddp.py",
        "is_sparse=name in self._sparse)",
        "is_sparse=False)",
        LOOKED,
    ),
    Mutant(
        "ddp cannot replay gradients of complex parameters",
        "engine/strategies/ddp.py",
        "(torch.view_as_real(parameter) if parameter.is_complex() else parameter)",
        "parameter",
        LOOKED,
    ),
    Mutant(
        "sparse gradients by hand are found out in the step, by torch",
        "engine/strategies/ddp.py",
        "if sparse := sparse_layers(module):",
        "if sparse := []:",
        "unit/strategies/test_build.py::test_sparse_gradients_by_hand_are_refused_under_ddp",
    ),
    Mutant(
        "processes drift apart by an embedding that scales its rows",
        "engine/strategies/base.py",
        "(max_norm_errors(module) if samples_apart else [])",
        "[]",
        "unit/strategies/test_layer_faults.py::test_it_is_named_by_every_strategy_over_several_processes",
    ),
    Mutant(
        "what was frozen in a fit under ddp may never train again",
        "engine/strategies/mixins.py",
        "            handle.remove()\n",
        "            pass\n",
        "distributed/test_parts.py::test_what_was_frozen_in_one_fit_trains_in_the_next",
    ),
    Mutant(
        "layers that come up train on each rank by themselves",
        "engine/strategies/mixins.py",
        "if id(p) not in fixed",
        "if False",
        "laws/test_strategies.py::test_a_layer_that_comes_up_is_refused_where_its_gradients_would_stay",
    ),
    Mutant(
        "DDP learns a static graph from a batch whose gradients stay",
        "engine/strategies/ddp.py",
        "if self._static_graph and window > 1:",
        "if False:",
        "unit/strategies/test_build.py::test_what_ddp_cannot_is_named",
    ),
    Mutant(
        "an optimizer with a part of its state on each rank is taken",
        "engine/strategies/ddp.py",
        'kind.__name__ == "ZeroRedundancyOptimizer"',
        "False",
        "unit/strategies/test_build.py::test_what_ddp_cannot_is_named",
    ),
    Mutant(
        "options of DDP that have no effect by hand are taken",
        "engine/strategies/ddp.py",
        "            self._check_averaging_outside_ddp(step.module)\n",
        "            pass\n",
        "unit/strategies/test_build.py::test_options_of_ddp_that_have_no_effect_by_hand_are_refused",
    ),
    Mutant(
        "a bucket of no size is taken",
        "engine/config/strategies.py",
        'c.options["bucket_cap_mb"] < 1',
        'c.options["bucket_cap_mb"] < 0',
        "unit/ranks/test_placement_refusals.py",
    ),
    Mutant(
        "what a recurrent layer keeps of its weights is said to be lost",
        "engine/objects/roots.py",
        ', "_flat_weight_refs"}',
        "}",
        "laws/test_objects.py::test_what_one_rank_holds_comes_back_or_is_named[a recurrent layer, sharded]",
    ),
]
