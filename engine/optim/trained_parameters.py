"""Which of a module's parameters an optimizer trains."""

from itertools import zip_longest

from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.errors import UserError

__all__ = ["TrainedParameters"]

#: what parameters are called, by group; None: one that training took from its module
Names = list[list[str | None]]


class TrainedParameters:
    """The parameters in the groups that an optimizer begins with: training may swap, replace or take them away.

    Args:
        optimizer: as every attempt makes it.
        module: what it trains.
        title: what errors call it.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, title: str) -> None:
        self._module, self._title = module, title
        self._known = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.groups = len(optimizer.param_groups)  #: how many there were
        self._built = self._names(optimizer)

    def moved(self, optimizer: Optimizer) -> Names | None:
        """Return what the parameters of these groups are called now; None if that is as it was.

        Raises:
            UserError: one of them is new, and no parameter of the module: no other attempt could find it.
        """
        if (now := self._names(optimizer)) == self._built:
            return None
        known = {id(parameter) for parameter in self._known}
        for group in optimizer.param_groups[: self.groups]:
            self.names([parameter for parameter in group["params"] if id(parameter) not in known])
        return now

    def move(self, optimizer: Optimizer, names: Names) -> None:
        """Let an optimizer train the parameters of these names; its state is given back after it."""
        parameters = dict(self._module.named_parameters())
        if len(names) < self.groups:  # training took the others away, and added none
            del optimizer.param_groups[len(names) :]
        for group, before, after in zip(optimizer.param_groups, self._names(optimizer), names, strict=False):
            members = group["params"]
            group["params"] = [
                parameters[name] if name else members[place] if was is None else self._apart(members[place])
                for place, (was, name) in enumerate(zip_longest(before[: len(after)], after))
            ]

    def names(self, parameters: list[Tensor]) -> list[str]:
        """Return what parameters of the module are called, those of a group that was added in training.

        Raises:
            UserError: one of them is no parameter of the module.
        """
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        if strange := [tuple(parameter.shape) for parameter in parameters if id(parameter) not in names]:
            raise UserError(
                f"{self._title} was given a group of parameters in training, and those of shape {strange[0]} are not "
                "the module's: a resumed run could not find them. Assign them to the module, or give them to the "
                "optimizer in configure_optimizers."
            )
        return [names[id(parameter)] for parameter in parameters]

    def _apart(self, parameter: Tensor) -> Tensor:
        """Return a parameter that no module has, in place of one that training took from its module."""
        copy = nn.Parameter(parameter.detach().clone())
        self._known.append(copy)
        return copy

    def _names(self, optimizer: Optimizer) -> Names:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups[: self.groups]]
