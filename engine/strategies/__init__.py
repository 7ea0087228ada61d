"""Strategies: how one module trains on many devices; config/strategies.py has a row for each.

base               what a strategy is: how one module trains on many devices
batch_split        cutting a batch into chunks, and joining what came out of them, by the rules of `nn.DataParallel`
build              strategies by name: nothing is imported until its name is asked for
collective         what ranks exchange beside gradients: values of any kind, on the host
ddp                one full replica per process, gradients averaged during backward
ddp2               a replica per process, each splitting its batch over several devices: dp inside a node, ddp across
                   nodes
dp                 one process that splits every batch over several devices
flat_tensors       many tensors that travel as one: a copy or a sum of each would take longer to begin than to end
gradient_buckets   gradients averaged bucket by bucket, the first ones while the backward pass still runs, where no DDP
                   does it
horovod            a full replica per process, gradients averaged in buckets of a fixed layout during backward
layer_faults       layers and tensors of a module that a strategy over several processes cannot hold, by name
mixins             what only some strategies need: each class is one ability, which the engine asks for by
                   `isinstance`
object_gather      values of any kind, from every rank: in one exchange where they are short, as most are
ordered_ddp        a full replica per process, in lanes: one order of sums whatever the number of processes
ordered_reducer    gradients added up in an order that does not depend on the number of ranks
rendezvous         where the ranks of a process group meet: in a store of torch's
replicas           replicas of a module, one for each chunk of a batch, within one process: what `nn.DataParallel`
                   does, repeatably
sharded            each rank has its rows of every weight, of its gradient and of what the optimizer keeps of it
sharded_blocks     which submodules are gathered by themselves in sharded training, and what is left for the rest
side_channel       how the ranks talk to each other beside training
single             one process, one device
step               how a step of the user's is run: the one place that calls `training_step`, `validation_step` and
                   their like
torch_collective   ranks that meet in a process group of torch's: over NCCL on GPUs, over gloo elsewhere
torch_internals    privates of `torch.distributed` and its kin, named here alone
xla                a full replica per core of a TPU, or whatever else torch_xla finds, gradients averaged by its
                   collectives
pipeline/          a sequence of layers as stages, one process each
"""
