"""Bugs in what is kept: durability, checksums, leases, lineage, pruning, weights."""

from mutants.mutant import Mutant

__all__ = ["SNAPSHOTS"]

DURABLE = "unit/storage/test_durability.py"

REBUILT = "faults/test_repair.py::test_weights_are_made_anew_where_the_newest_snapshot_holds_them"

SNAPSHOTS = [
    Mutant(
        "a file is not durable before it has its name",
        "engine/storage/local.py",
        "            os.fsync(handle)\n        finally:\n            os.close(handle)\n    except",
        "            pass\n        finally:\n            os.close(handle)\n    except",
        DURABLE,
    ),
    Mutant(
        "a name is not durable",
        "engine/storage/local.py",
        "            draft.unlink(missing_ok=True)\n            raise\n        _sync_folder(target.parent)\n",
        "            draft.unlink(missing_ok=True)\n            raise\n",
        DURABLE,
    ),
    Mutant(
        "a name that was created is not durable",
        "engine/storage/local.py",
        "        _sync_folder(target.parent)\n        return True\n",
        "        return True\n",
        DURABLE,
    ),
    Mutant(
        "a new folder is not durable",
        "engine/storage/local.py",
        "    folder.mkdir(exist_ok=True)\n    _sync_folder(folder.parent)\n",
        "    folder.mkdir(exist_ok=True)\n",
        DURABLE,
    ),
    Mutant(
        "creating replaces what is there",
        "engine/storage/local.py",
        "target.hardlink_to(draft)",
        "os.replace(draft, target)",
        "unit/storage/test_store.py::test_a_local_store_leaves_no_drafts",
    ),
    Mutant(
        "something is written after the manifest",
        "engine/snapshots/committer.py",
        "        return decode_document(data, name)\n",
        '        self._store.write(f"{SNAPSHOTS}/{name}/{ROWS}", taken.rows.encode())\n'
        "        return decode_document(data, name)\n",
        DURABLE,
    ),
    Mutant(
        "a superseded world commits",
        "engine/snapshots/committer.py",
        "        ensure_newest(self._store, self._lease)\n        for old in request.dropped:",
        "        for old in request.dropped:",
        "unit/snapshots/test_lease.py::test_a_superseded_writer_finds_out_and_commits_nothing",
    ),
    Mutant(
        "sizes are not compared before a commit",
        "engine/snapshots/committer.py",
        'if found.get(file) != digest["bytes"]:',
        "if False:",
        "unit/snapshots/test_committer.py::test_a_store_that_ranks_do_not_share_is_refused",
    ),
    Mutant(
        "an error of one rank does not reach the others",
        "engine/snapshots/committer.py",
        "            if failed is not None:\n                raise",
        "            if failed is not None and rank == self._world.rank:\n                raise",
        "unit/snapshots/test_committer.py::test_an_error_of_one_rank_reaches_all",
    ),
    Mutant(
        "the checksum of a file is not compared",
        "engine/storage/checksums.py",
        'if expected["xxh3_128"] != found["xxh3_128"]:',
        "if False:",
        "unit/snapshots/test_damage.py::test_damage_is_found_and_the_newest_good_one_is_taken",
    ),
    Mutant(
        "the checksum of a manifest is not compared",
        "engine/storage/checksums.py",
        "whole = _is_whole(data)",
        "whole = bool(checksum)",
        "unit/storage/test_store.py::test_any_flipped_byte_of_a_document_is_found",
    ),
    Mutant(
        "what is read is not checked",
        "engine/snapshots/reader.py",
        '    check_digest(f"{store.url}/{path}", expected, digest_of([data]))\n',
        "",
        "unit/snapshots/test_damage.py::test_the_reader_checks_what_it_reads",
    ),
    Mutant(
        "a generation whose answer was lost is taken twice",
        "engine/snapshots/lease.py",
        "if store.create(path, data) or store.read(path) == data:",
        "if store.create(path, data):",
        "unit/snapshots/test_lease.py::test_a_generation_whose_answer_was_lost_is_taken_once",
    ),
    Mutant(
        "a superseded world removes snapshots",
        "engine/snapshots/retention.py",
        "            ensure_newest(self._store, self._lease)  # a newer",
        "            pass  # a newer",
        "unit/snapshots/test_lease.py::test_a_superseded_writer_removes_nothing",
    ),
    Mutant(
        "one snapshot too many is removed",
        "engine/snapshots/retention.py",
        "        while len(known) > self._keep:",
        "        while len(known) >= self._keep:",
        "unit/snapshots/test_retention.py::test_pruning_keeps_the_newest_and_every_row",
    ),
    Mutant(
        "what a stale world committed late counts",
        "engine/snapshots/lineage.py",
        "return end is None or position <= end",
        "return True",
        "unit/snapshots/test_lease.py::test_a_late_commit_of_a_stale_generation_is_never_read",
    ),
    Mutant(
        "a manifest of another place counts",
        "engine/snapshots/catalog.py",
        "        if found != name:\n",
        "        if False:\n",
        "unit/snapshots/test_damage.py::test_a_renamed_folder_is_set_aside",
    ),
    Mutant(
        "a snapshot of another run counts",
        "engine/snapshots/catalog.py",
        'if lineage.run_id and manifest.get("run_id") != lineage.run_id:',
        "if False:",
        "unit/snapshots/test_damage.py::test_a_snapshot_of_another_run_is_set_aside",
    ),
    Mutant(
        "files go before their manifest",
        "engine/snapshots/catalog.py",
        '[MANIFEST], [*snapshot.manifest["files"]])',
        '[*snapshot.manifest["files"]], [MANIFEST])',
        "unit/snapshots/test_retention.py::test_a_kill_at_any_moment_of_pruning_loses_nothing",
    ),
    Mutant(
        "rows go before they are folded",
        "engine/snapshots/metric_segments.py",
        "            rows, damaged = self._rows(files)\n",
        "            rows, damaged = self._rows(files)\n            self._store.remove(files[0])\n",
        "unit/snapshots/test_retention.py::test_a_kill_at_any_moment_of_folding_loses_nothing",
    ),
    Mutant(
        "old weights go before the new ones count",
        "engine/snapshots/weights.py",
        '        self._store.write(f"{self._folder}/{file}", weights.staged.data)\n',
        "        self._store.remove(self._folder)\n"
        '        self._store.write(f"{self._folder}/{file}", weights.staged.data)\n',
        "unit/snapshots/test_weights.py::test_a_kill_while_weights_are_replaced_leaves_whole_ones",
    ),
    Mutant(
        "weights of a superseded world count",
        "engine/snapshots/weights_index.py",
        "(parse_name(stem) and lineage.holds(stem))]",
        "parse_name(stem)]",
        "unit/snapshots/test_weights_queue.py::test_weights_beyond_the_snapshot_that_a_newer_world_resumed_from_do_not_count",
    ),
    Mutant(
        "each rank agrees with itself when a snapshot is due",
        "engine/snapshots/schedule.py",
        "wanted = max(self._gather(wanted))",
        "self._gather(wanted)",
        "unit/snapshots/test_schedule.py::test_every_rank_gives_the_same_answer_whatever_its_clock_says",
    ),
    Mutant(
        "the last rows of a tensor go to no rank",
        "engine/state/row_shards.py",
        "each = -(-rows // size)",
        "each = rows // size",
        "unit/state/test_row_shards.py",
    ),
    Mutant(
        "a snapshot whose folder cannot be listed is swept",
        "engine/snapshots/catalog.py",
        'if not any(self._store.exists(f"{SNAPSHOTS}/{name}/{file}") for file in (MANIFEST, _ASIDE)):',
        "if True:",
        "unit/snapshots/test_sweep.py",
    ),
    Mutant(
        "a chunk that was not answered is never asked for anew",
        "engine/storage/s3.py",
        "yield self._retried(lambda: fetched(start))",
        "yield fetched(start)",
        "unit/storage/test_s3.py::test_a_chunk_that_is_not_answered_is_asked_for_anew",
    ),
    Mutant(
        "a late request of an older world is done",
        "engine/storage/s3.py",
        'condition = {"IfNoneMatch": "*"} if before is None else {"IfMatch": before}',
        "condition: dict[str, str] = {}",
        "unit/storage/test_s3.py::test_a_late_request_of_a_world_that_was_superseded_is_refused",
    ),
    Mutant(
        "of large weights some elements are compared",
        "engine/training/checkpointing/replica_check.py",
        "None if tensor.is_cpu else _SAMPLE_BYTES",
        "_SAMPLE_BYTES",
        "unit/training/test_replica_check.py::test_one_element_that_differs_is_named",
    ),
]
