"""Pipelines: a sequence of layers as stages, one process each.

balance   how many layers each stage gets: given, or balanced by size or by time
schedule  runs the micro-batches of a batch through the stages of a pipeline
stage     the stages of a pipeline: the layers of `sequential_module` that a rank keeps
strategy  the strategy: the layers of a module in stages, one process each
"""
