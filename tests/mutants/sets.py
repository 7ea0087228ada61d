"""Planted bugs of the order of sets: what their hash tables are, and what comes of them in the next life."""

from mutants.mutant import Mutant

__all__ = ["SETS"]

TABLES = "unit/state/test_hash_table.py"
POOLS = "laws/test_objects.py::test_a_resumed_life_has_what_the_life_before_had[Pools]"

SETS = [
    Mutant(
        "a set that a module has is filled in its order alone",
        "engine/objects/instances.py",
        'table = node.state.get("table")',
        "table = None",
        POOLS,
    ),
    Mutant(
        "a set is described by its items alone",
        "engine/objects/container_writers.py",
        ", **described_table(value, items))",
        ")",
        POOLS,
    ),
    Mutant(
        "a table is as large as what it holds makes it",
        "engine/state/hash_table.py",
        "                _enlarge(target, first, self.size)\n",
        "                pass\n",
        f"{TABLES}::test_a_set_made_anew_goes_on_as_the_other[large numbers]",
    ),
    Mutant(
        "pop looks from the first slot on",
        "engine/state/hash_table.py",
        "            _set_finger(target, self.finger or _unused_finger(self.size))\n",
        "            pass\n",
        f"{TABLES}::test_a_set_of_many_is_made_anew_and_read_back[0]",
    ),
    Mutant(
        "two tables with the same slots are taken for alike",
        "engine/state/hash_table.py",
        "if list(plain) == items and HashTable.of(plain) == table",
        "if HashTable.of(plain) == table",
        f"{TABLES}::test_a_set_made_anew_goes_on_as_the_other",
    ),
    Mutant(
        "the slots of text are kept where no other process hashes it alike",
        "engine/state/hash_table.py",
        '_NUMBERS if os.environ.get("PYTHONHASHSEED", "random") == "random" else',
        '_NUMBERS if os.environ.get("PYTHONHASHSEED") == "none" else',
        f"{TABLES}::test_a_table_is_kept_where_another_process_can_make_it",
    ),
    Mutant(
        "a set of a state_dict is written without its table",
        "engine/state/codec.py",
        ", **described_table(value, list(value))}",
        "}",
        f"{TABLES}::test_a_set_of_many_is_made_anew_and_read_back[0]",
    ),
]
