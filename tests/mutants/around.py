"""Bugs around a run: champions, checks of exactness, tasks and flows."""

from mutants.mutant import Mutant

__all__ = ["AROUND"]

CHAMPIONS = "unit/test_champions.py"
EXACT = "unit/test_exactness.py"

AROUND = [
    Mutant(
        "the margin itself is enough",
        "engine/registry/comparison.py",
        "if gain <= margin:",
        "if gain < margin:",
        f"{CHAMPIONS}::test_only_the_better_one_is_promoted",
    ),
    Mutant(
        "a challenger that is not finite is crowned",
        "engine/registry/comparison.py",
        "if not math.isfinite(new):",
        "if math.isnan(new):",
        f"{CHAMPIONS}::test_only_the_better_one_is_promoted",
    ),
    Mutant(
        "smaller is always better",
        "engine/registry/comparison.py",
        'gain = new - old if mode == "max" else old - new',
        "gain = old - new",
        f"{CHAMPIONS}::test_only_the_better_one_is_promoted",
    ),
    Mutant(
        "damaged weights are crowned",
        "engine/registry/registry.py",
        '        check_facts(f"{source.url}/{folder}/{saved.file}", saved.expected, facts_of([data]))\n',
        "",
        f"{CHAMPIONS}::test_damaged_weights_are_not_crowned",
    ),
    Mutant(
        "a roll-back can only go back once",
        "engine/registry/registry.py",
        "back.module_args, back.before, None)",
        "back.module_args, reigning.number, None)",
        f"{CHAMPIONS}::test_the_last_crowned_reigns_and_a_roll_back_goes_back_one_by_one",
    ),
    Mutant(
        "a crown whose answer was lost is somebody else's",
        "engine/registry/registry.py",
        "if self._store.create(path, data) or self._store.read(path) == data:",
        "if self._store.create(path, data):",
        f"{CHAMPIONS}::test_a_crown_whose_answer_was_lost_is_ones_own",
    ),
    Mutant(
        "a night knows new data by their folder",
        "engine/registry/nightly.py",
        'return {**data, "folder": None} != {**found["data"], "folder": None}',
        'return data != found["data"]',
        f"{CHAMPIONS}::test_data_are_new_that_differ_from_the_last_decided_nights",
    ),
    Mutant(
        "a sample that was read otherwise is not told",
        "engine/testing/batch_journal.py",
        "            if a != b:\n",
        "            if False:\n",
        f"{EXACT}::test_wrong_data_are_told_by_the_sample",
    ),
    Mutant(
        "ends are not compared",
        "engine/testing/resume_check.py",
        "faults += [_line(*difference) for difference in differing(expected, found)]",
        "pass",
        f"{EXACT}::test_a_wrong_module_is_told_what_is_wrong_with_it",
    ),
    Mutant(
        "a stop that comes while Prefect is called is lost",
        "tasks/monitor.py",
        "    if held:\n        handlers[held[0]](held[0], None)",
        "    held.clear()",
        "flows/test_watch.py",
    ),
    Mutant(
        "the key of an artifact is what Prefect refuses",
        "tasks/resources.py",
        '.lower()).strip("-")',
        ').strip("-")',
        "unit/test_packaging.py::test_doctests[midstride.tasks.resources]",
    ),
    Mutant(
        "an error of the user's is tried again",
        "tasks/launch.py",
        "if context is None or isinstance(error, UserError):",
        "if context is None:",
        "flows/test_train.py::test_an_error_in_user_code_is_not_tried_again_and_comes_first",
    ),
    Mutant(
        "data are prepared again by a flow that is retried",
        "tasks/prepare.py",
        "cache_policy=INPUTS + RUN_ID,",
        "cache_policy=INPUTS + RUN_ID, refresh_cache=True,",
        "flows/test_train.py::test_data_are_prepared_once_for_a_flow_that_is_retried",
    ),
    Mutant(
        "data that are gone are taken from a cache",
        "flows/train.py",
        "    if is_unchanged(manifest):\n",
        "    if manifest:\n",
        "flows/test_train.py::test_data_that_are_gone_are_prepared_again",
    ),
    Mutant(
        "a secret stays in the environment",
        "tasks/credentials.py",
        "            os.environ.pop(variable)\n",
        "",
        "flows/test_credentials.py",
    ),
    Mutant(
        "a schedule is meant in UTC",
        "flows/deployment.py",
        "return Cron(cron, timezone=zone)",
        'return Cron(cron, timezone="UTC")',
        "flows/test_deployment.py::test_a_deployment_keeps_job_schedule_and_variables_and_is_replaced",
    ),
    Mutant(
        "a relative path is deployed",
        "flows/deployment.py",
        "    faults += relative_paths(job)\n",
        "",
        "flows/test_deployment.py::test_what_is_wrong_with_a_deployment_is_said_at_once",
    ),
    Mutant(
        "a stack stands beside the words of an error",
        "flows/log_filters.py",
        "return not (record.exc_info and isinstance(record.exc_info[1], EngineError))",
        "return True",
        "unit/test_log_words.py",
    ),
    Mutant(
        "one GPU more than there are is taken",
        "engine/ranks/gpus.py",
        "    if count > available:\n",
        "    if count > available + 1:\n",
        "unit/test_placement.py::test_other_gpus_are_refused_with_what_was_given_and_what_is_there",
    ),
    Mutant(
        "what is set from outside is always text",
        "engine/config/yaml_file.py",
        "place[last] = value",
        "place[last] = text",
        "unit/test_job.py::test_choices_set_from_outside",
    ),
    Mutant(
        "a faulty job ends as a failed run does",
        "engine/cli/app.py",
        "sys.exit(error.exit_code)",
        "sys.exit(1)",
        "unit/test_cli.py::test_faults_end_with_2_in_one_block",
    ),
    Mutant(
        "a view comes back as a tensor of its own",
        "engine/objects/containers.py",
        "        return filling.set(live, path)\n    return filling.set(view, path)",
        "        return filling.set(live.clone(), path)\n    return filling.set(view.clone(), path)",
        "laws/test_objects.py::test_a_resumed_life_has_what_the_life_before_had",
    ),
]
