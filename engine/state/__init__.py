"""The state of a run as a tree: its parts, its encoding in files, and comparisons.

arrays           numpy values as JSON and tensors: the dtype is kept, byte order, structure and units included
bounds           checks of documents that are read: a snapshot is not trusted, and can reach nothing outside
                 of its own files
codec            a tree of state as plain JSON beside named tensors
differences      where two trees of state differ, bit for bit
dtypes           the dtypes that a file may name, from fixed lists
hash_table       the hash table of a set: the slots of its items, and those of removed items
module_index     the members of a module by name, looked up anew only where they have changed
object_nodes     nodes of a tree of state that describe objects: references, views and instances
row_shards       the rows of a tensor that one rank has, found and joined for another number of ranks
shared_containers  references between the places of a tree that hold the same container
stateful         the state of a run: parts with `state_dict` and `load_state_dict`
tensor_blocks    dicts of tensors that an encoder has met, so that unchanged ones are not encoded again
tensor_digest    digests of the content of tensors, on any device and in any layout
tensor_file      reads ranges of safetensors files, with the blocks around them verified
tensor_header    the header of a safetensors file
tensors          copies tensors to be written, and rebuilds them with their strides and the memory they share
torch_internals  private names of torch's tensors that this package uses

Tests: tests/unit/state
"""
