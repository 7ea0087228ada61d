"""The callbacks of a Trainer: those that it was given, in every attempt."""

from typing import NoReturn

from midstride.engine.errors import UserError
from midstride.engine.modules.callbacks import Callback

__all__ = ["FixedCallbacks"]


class FixedCallbacks(tuple[Callback, ...]):
    """Callbacks in the order in which they are called; none comes or goes."""

    __slots__ = ()

    def append(self, *_: object) -> NoReturn:
        """Refuse the change, which no hook would see.

        Raises:
            UserError: always.
        """
        raise UserError(
            "trainer.callbacks cannot be changed, as every attempt has to find them alike: give them to "
            "Trainer(callbacks=[...]), or return them in the module's configure_callbacks."
        )

    extend = insert = remove = pop = clear = append
