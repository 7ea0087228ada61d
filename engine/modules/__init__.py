"""What a user writes, and what the engine reads of it.

callback_states  the state of callbacks, and of a DataModule that has one, as a part of a run's
callbacks        `Callback`, and what logs learning rates
fixed_callbacks  the callbacks of a Trainer, which stay those that it was given
hooks            the hooks that a module and its callbacks have written, looked up once
hyperparameters  `save_hyperparameters`: the arguments that a module or its data were made with
interface        `TrainerInterface`: what a module, its hooks and its callbacks may use of the Trainer
layers           layers of a module that were removed, or became the same object as others, in training
manual_optimization  what a module calls to step its optimizers by hand
module           `TrainingModule` and `DataModule`
module_hooks     the hooks of a module, which do nothing until they are overridden
module_state     state of a module besides weights and attributes: other buffers, train or eval mode, frozen parts
monitors         callbacks that watch one logged value: they keep the best weights, or stop the training
named_tensors    the parameters and persistent buffers of a module, by name
new_layers       layers that came up in training, described whole and built again
progress         `Progress`: the counts that say where a run stands
returned_weights  weights that come back from a rank in another process, also into changed layers
shared_tensors   parameters and buffers that are one tensor under several names
structure        layers, parameters and buffers that training adds, removes or replaces
tensor_forms     kind, shape, dtype and strides of parameters and buffers, and how they change in training
torch_internals  privates of `torch.nn`, named here alone

Tests: tests/unit/modules, tests/laws/test_resume.py
"""
