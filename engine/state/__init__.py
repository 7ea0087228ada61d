"""The state of a run as a tree: what holds it, how it becomes files, where two differ.

arrays           numpy values as JSON and tensors: the dtype is kept, byte order, structure and units included
bounds           bounds of what is read: a snapshot may come from anywhere, and gets nothing that its own
                 files do not hold
codec            a tree of state as plain JSON beside named tensors
differences      where two trees of state differ, bit for bit
dtypes           types of elements that a file may name, from fixed lists: a name looks up nothing, and no
                 type holds addresses
hash_table       the hash table of a set: where its items stand, and where some were removed
naming           how messages call the values of a state, and where they stand
nodes            what a tree of state says of objects: that two names share one, and what one consists of
row_shards       tensors of which each rank has some rows, joined and sharded for another number of ranks
sharing          containers that stand in a tree of state more than once: written at the first place, and
                 pointed to at the others
stateful         the state of a run: parts that can say what they are and become it again
tensor_digest    digests of what stands in tensors, wherever they are and however they are laid out
tensor_file      files of tensors (safetensors), read in one pass: checked against their digests, each tensor
                 into memory of its own
tensors          tensors on their way to a file and back: copied, with their strides and the memory they share
torch_internals  privates of torch's tensors, named here alone
"""
