"""Strategies: one module on many devices. config/strategies.py has a row for each.

base               `Strategy`, the base class: how one module trains on many devices
batch_split        cuts a batch into chunks, and joins the outputs for them, by the rules of `nn.DataParallel`
build_strategy     builds strategies by name; the module of a strategy is imported only when it is built
collective         exchanges between ranks other than gradients: Python values on the host, also in a thread
ddp                one full replica per process, gradients averaged during backward
dp                 each process splits its batches over several devices: a repeatable `nn.DataParallel`
flat_tensors       groups small tensors into flat ones, to copy or sum them together
gradient_buckets   averages gradients in buckets, the first ones while the backward pass still runs, outside of DDP
horovod            a full replica per process, gradients averaged in buckets of a fixed layout during backward
layer_faults       finds layers and tensors that strategies over several processes do not support
mixins             optional abilities of strategies: one class each, which the engine checks for by `isinstance`
ordered_ddp        DDP in lanes: sums in an order that does not depend on the number of processes
own_loop           the ranks of a loop of the user's own, whose module can be in `DistributedDataParallel`
peers              proves that the ranks of a group are those of the run, before a pickle of theirs is read
rendezvous         the `torch.distributed.Store` over which the ranks of a world connect
sharded            each rank has its rows of every weight, gradient and optimizer state (`fully_shard`)
single             one process, one device
step               runs the user's steps: the only place that calls `training_step`, `validation_step` and the like
torch_collective   the collective over a process group of torch: NCCL on GPUs, gloo elsewhere
torch_internals    private names of torch that strategies use
xla                a full replica per core of a TPU, or another device of torch_xla, gradients averaged by its
                   collectives
pipeline/          a sequence of layers as stages, one process each

Tests: tests/unit/strategies, tests/laws/test_strategies.py, tests/laws/test_plain.py, tests/distributed
"""
