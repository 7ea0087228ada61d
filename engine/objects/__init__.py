"""The object graph: what Python objects hold, taken once by identity and put back in place.

array_sharing      arrays that come to share memory in training: a file holds each of them alone, so they are named
attribute_restore  the attributes of a live object, put back as a node says, and the class it is of
attributes         the attributes of an object, wherever its class keeps them
code_changes       what the code of an attempt builds, beside what that of the snapshot's attempt built: it may have
                   been mended since
code_state         what user code keeps beside objects: on its classes, in globals of its modules, in its functions
container_writers  how containers are described, and what nothing is known of but its class: their writers
containers         how values, tensors and containers are put back: a filler for each type of node
data_sets          data sets: which hold nothing but attributes, so that these are all of their state
digest             A digest of what a module, its data, their classes and their files' globals hold at the end of a
                   training
distributed_tensors  tensors that are cut over the ranks, such as copies of weights: each rank keeps its rows
function_cache     functions that cache their results (`functools.cache`, `lru_cache`): no snapshot holds these
function_code      what tells functions of one name apart, such as two lambdas that one method makes: their code
functions          how functions, methods, partials and weak references are put back
generators         generators that an object holds: found where a reader of its code would find them, seeded like the
                   main ones
graph              what a run's state is made of beyond weights, taken once, by identity
graph_restore      the nodes that a `GraphWalk` made, put back into live objects
hashed_items       keys of dicts and items of sets that are objects: what is equal, or at another address, in the next
                   attempt
instances          how instances are put back: a filler for each form of node
node_writers       how each kind of object is described: a writer for each class, which returns its node
object_state       what a run's objects hold beside weights: attributes of modules, callbacks, data, optimizers and
                   schedulers
plain_values       what is written as it is or made from a few arguments, and what is too large to be state
process_state      what user code sets for the whole process: settings of torch, variables of the environment
python_objects     iterators, arrays and shared values of Python's own: how they are described, and how they are put
                   back
registered_hooks   the hooks that user code registers on modules and optimizers: what they hold is state, which there
                   are is not
reseed_hook        what an object with a method `reseed(seed)` draws from: whatever that method sets
restored_memory    which memory stands for which: that of tensors in a snapshot, and that of the tensors which take
                   their values
roots              the roots of a walk over objects: attributes of a module and of what is in it, and the hooks on these
shared_memory      memory that processes share: what one of them writes to it, the others see
side_effects       a step of a module that leaves nothing behind
unwritable         what of a run's objects no file can hold: named, once
user_modules       the files that the classes of a training stand in, and those that these import
"""
