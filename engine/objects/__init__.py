"""The objects of a run: a graph of what user code holds, described by identity and restored in place.

array_sharing      warns of arrays that come to share memory in training, which no snapshot can express
attribute_restore  restores the attributes of a live object, and its class
attributes         reads and sets the attributes of an object, in `__dict__` or in slots
changes            differences between the objects that this attempt's code builds and those of the snapshot's code
code_state         state that user code keeps outside objects: on classes, in globals, in functions
container_writers  describe containers, and objects of which only the class is known
containers         restore values, tensors and containers: one function for each type of node
data_sets          data sets whose attributes are all of their state
device_tensors     tensors of an accelerator in states that user code gives: marked, and brought back to the device
digest             a digest of everything that module, data, their classes and globals hold, for tests
distributed_tensors  tensors that are cut over the ranks, such as copies of weights: each rank keeps its rows
function_cache     functions that cache results (`functools.cache`, `lru_cache`): no snapshot holds these
function_code      a digest of a function's code, which tells functions of one name apart, such as two lambdas
functions          restore functions, methods, partials and weak references
generator_search   the random number generators that an object holds, found and seeded
walk               walks the object graph once and makes a node of each object
restore            puts the nodes that a `GraphWalk` made back into live objects
hashed_items       objects that are keys of dicts or items of sets, whose hash may differ in the next attempt
instances          restore instances: one function for each form of node
library_objects    which objects of libraries are compared between snapshots
node_writers       describe instances, functions and generators: one writer for each kind of object
object_state       `Objects`: everything of the above as one part of a run's state
plain_values       values that are written as they are, and which of them are too large to be state
process_state      what user code sets for the whole process: settings of torch, variables of the environment
python_objects     describe and restore iterators, arrays and shared values of the standard library
registered_hooks   warns of hooks that training registers or removes; what a hook holds is state
reseed_hook        data with a method `reseed(seed)`: which generators that method sets
restored_memory    maps the memory of tensors in a snapshot to that of the tensors that take their values
roots              where a walk begins: the attributes of a module and its submodules, and their hooks
shared_memory      memory that several processes share
side_effects       runs a step of a module and reverts everything it changed
watch              warns, once, of objects that no file can hold
user_modules       the Python modules of the user's classes, and those that they import

Tests: tests/unit/objects, tests/laws/test_objects.py, tests/laws/objects
"""
