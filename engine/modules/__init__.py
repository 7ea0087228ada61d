"""The base classes of users, and the state of their objects.

averaging        a callback that keeps averaged weights, and evaluates with them
callback_states  the states of callbacks, and of a DataModule, as a part of the state of a run
callbacks        `Callback`, `LearningRateMonitor`, and the fixed tuple of a Trainer's callbacks
compiled         modules that `torch.compile` has wrapped, compiled in place
hooks            the hooks that a module and its callbacks override, looked up once
hyperparameters  `save_hyperparameters`: the constructor arguments of a module or its data
interface        `TrainerInterface`: the part of the Trainer for modules, hooks and callbacks
layers           layers that training adds, removes, shares or reorders
module           `TrainingModule` and `DataModule`
module_hooks     the hooks of a module, which do nothing until they are overridden
module_state     state of a module besides weights and attributes: other buffers, train or eval mode, frozen parts
monitors         callbacks that watch one logged value: they keep the best weights, or stop the training
progress         `Progress`: the counts that say where a run stands
quantized        weights that libraries have quantized, as plain tensors
schedules        callbacks that change training at the start of an epoch
state_entries    objects in a module's state_dict that its class adds
structure        how training changed layers, parameters and buffers, as a part of the state of a run
timers           callbacks with a clock
torch_internals  private names of `torch.nn`, used here alone

Tests: tests/unit/modules, tests/laws/test_resume.py
"""
