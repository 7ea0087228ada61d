"""Kinds of objects: each is described as a node and restored from one, both in one class.

arrays           arrays, data types and scalars of numpy, arrays of objects, `array.array`, ctypes
blocks           long lists and deques of items with one structure
containers       lists, tuples, dicts, sets, deques, named tuples, and items of classes derived from them
functions        functions, closures, methods, partials, weak references and containers
generators       random number generators of torch, numpy and Python
iterators        counts, positions in containers, `itertools`
kind             the base class
library_objects  objects of libraries: by `state_dict`, or compared between snapshots
opaque           objects of which a snapshot holds the class only, and data that are left out
plain            numbers, text, enums, dates, paths; classes and addresses
reduced          objects of libraries in the parts that pickle writes
table            one row for each kind, in the order in which they are asked for a class
tables           tables, columns and indices of pandas
tensors          tensors, views, gradients, tensors on devices, rows of sharded tensors
user_objects     objects by their attributes: of the user's classes, modules, data sets of torch

Tests: tests/unit/objects, tests/laws/test_objects.py, tests/laws/objects
"""
