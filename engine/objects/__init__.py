"""Objects of a run: a graph of user code's objects, restored in place by identity.

array_memory      finds the memory that arrays share with other arrays and with tensors
attributes        reads and sets the attributes of an object, in `__dict__` or in slots
changes           differences between the objects that this attempt's code builds and those of the snapshot's code
classes           classes by their names: whose objects can be made anew, whose attributes are all of their state
constants         plain values that the user's code reads, which the next attempt may have otherwise
digest            a digest of everything that module, data, their classes and globals hold, for tests
generator_search  the random number generators that an object draws from when it is read
kinds/            one class for each kind of object, with `describe` and `restore`
left_out          which values are left out of snapshots: large ones, and memory that processes share
made_by_reading   what reading data makes and each attempt makes itself, such as open files
object_state      `Objects`: everything of the above as one part of a run's state
restore           puts the nodes that a `GraphWalk` made back into live objects
restored_memory   maps the memory of tensors in a snapshot to that of the tensors that take their values
roots             where walks begin: a module's attributes and hooks, classes and globals, settings of the process
user_modules      the Python modules of the user's classes, and those that they import
walk              walks the object graph once and makes a node of each object
watch             warns, once, of what no snapshot can hold: opaque objects, shared memory, changed hooks

Tests: tests/unit/objects, tests/laws/test_objects.py, tests/laws/objects
"""
