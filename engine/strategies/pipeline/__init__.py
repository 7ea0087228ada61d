"""Pipelines: a sequence of layers as stages, one process each.

balance   where a sequence of layers is cut into stages: by hand, by size, or by time
schedule  how batches flow through the stages of a pipeline, part by part
stage     the stages of a pipeline: what a rank keeps of `sequential_module`
strategy  a module too large for one device: its layers in stages, one a process, and batches that flow
          through in parts
"""
