"""What a user writes, and what the engine reads of it.

callbacks        what acts beside a module at its hooks, with state of its own
hooks            who wants to be called when, found once, so that a hook that is not written costs nothing
hyperparameters  the arguments a module or its data were made with
interface        what a module, its hooks and its callbacks may use of the Trainer that runs them
layers           which layers a module has, by path: those that are gone, and those that are one with others, in
                 training
module           what a user writes: a module that trains, and the data it trains on
module_hooks     the hooks of a module, called at set points of a fit, a validation, a test and a prediction
module_state     what a user's module carries besides weights and attributes: other buffers, and which parts
                 of it train
progress         where a run stands
returned_weights  weights from another process, where hooks and training gave the module other layers
structure        what a module has come to consist of since it was built: layers, parameters and buffers that
                 came up in training
torch_internals  privates of `torch.nn`, named here alone
"""
