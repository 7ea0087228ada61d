"""Warns of parameters, layers, validations and monitors without a part in a fit."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from midstride.engine.config.options import TrainerOptions
from midstride.engine.errors import UserError
from midstride.engine.formatting import format_names
from midstride.engine.modules.callbacks import Callback
from midstride.engine.modules.module import TrainingModule, has_step
from midstride.engine.modules.monitors import Monitor
from midstride.engine.state.module_index import ModuleIndex

__all__ = ["check_gradients", "idle_evaluation", "layers_in_eval_mode", "untrained_parameters"]


def untrained_parameters(optimizers: Sequence[Optimizer], module: nn.Module) -> list[str]:
    """Return messages on foreign parameters in optimizers, and parameters in no optimizer."""
    parameters = ModuleIndex.of(module).now().parameters
    own = {*map(id, parameters.values())}
    given = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    name = type(module).__name__
    lines = []
    if strange := len(given - own):
        lines.append(
            f"{strange} of {len(given)} parameters in the optimizers are not the module's: the weights of {name} do "
            "not hold them. Make a layer of them an attribute of the module, and a tensor an nn.Parameter that is one; "
            "build the optimizers from self.parameters() in configure_optimizers"
        )
    trains = {name: p for name, p in parameters.items() if p.requires_grad}
    averages = [layer for layer in module.modules() if isinstance(layer, AveragedModel)]  # change by their own rule
    given |= {id(parameter) for average in averages for parameter in average.parameters()}
    if left := [path for path, parameter in trains.items() if id(parameter) not in given]:
        lines.append(
            f"{len(left)} of {len(trains)} parameters of {name} that collect gradients are in no optimizer and do not "
            f"change: {format_names(left, 3)}. If this is intended, requires_grad_(False) saves their gradients"
        )
    return lines


def layers_in_eval_mode(module: nn.Module) -> list[str]:
    """Return a message on layers of `module` in eval mode, which stay in it during training."""
    layers = ModuleIndex.of(module).now().modules
    still = [path for path, layer in layers.items() if not layer.training]
    if not still:
        return []
    uppermost = [path for path in still if not path or layers[path.rpartition(".")[0]].training]
    return [
        f"{len(still)} of {len(layers)} layers of {type(module).__name__} are in eval mode and stay in it during "
        "training: dropout is off and batch statistics do not change in "
        f"{format_names([path or 'all of it' for path in uppermost], 3)}. If this is not "
        "intended, call train() before fit"
    ]


def check_gradients(optimizer: Optimizer, module: nn.Module) -> None:
    """Check in the first step that some parameter of `optimizer` has a gradient.

    Raises:
        UserError: none has.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(parameter.grad is None for parameter in parameters):
        raise UserError(
            f"the loss of {type(module).__name__}.training_step gives none of the {len(parameters)} parameters of "
            f"{type(optimizer).__name__} a gradient: nothing is trained. The loss is a new tensor, such as "
            "torch.tensor(loss.item(), requires_grad=True), or it does not depend on the optimizer's parameters."
        )


def idle_evaluation(
    module: TrainingModule, callbacks: Sequence[Callback], loaders: int, options: TrainerOptions
) -> list[str]:
    """Return messages on validation loaders, `validation_step` and monitors without another."""
    name = type(module).__name__
    validates = has_step(module, "validation_step")
    lines = []
    if loaders and not validates:
        lines.append(f"there are validation loaders, and {name} has no validation_step: they are not used")
    if validates and not loaders:
        lines.append(f"{name}.validation_step is never called: there is no validation loader. Define val_dataloader")
    monitors, idle = [one for one in callbacks if isinstance(one, Monitor)], list[Monitor]()
    every, last = options.check_val_every_n_epoch, options.max_epochs
    if validates and loaders and every is not None and last is not None and every > last:
        lines.append(f"check_val_every_n_epoch is {every}, and max_epochs {last}: no validation will run")
        idle = [one for one in monitors if not one.waits_for_epoch_end(options)]
    elif not (loaders and validates) or options.limit_val_batches == 0:
        idle = [one for one in monitors if one.check_on_train_epoch_end is False]
    return lines + [
        f"{type(one).__name__} checks {one.monitor} after a validation, and there is none: it has no effect"
        for one in idle
    ]
