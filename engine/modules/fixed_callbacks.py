"""The callbacks of a Trainer, which cannot be changed after it was made."""

from typing import NoReturn

from midstride.engine.errors import UserError
from midstride.engine.modules.callbacks import Callback

__all__ = ["FixedCallbacks"]


class FixedCallbacks(tuple[Callback, ...]):
    """Callbacks in the order in which they are called; none can be added or removed."""

    __slots__ = ()

    def append(self, *_: object) -> NoReturn:
        """Refuse the change: hooks are looked up once, so it would have no effect.

        Raises:
            UserError: always.
        """
        raise UserError(
            "trainer.callbacks cannot be changed, as every attempt has to find them alike: give them to "
            "Trainer(callbacks=[...]), or return them in the module's configure_callbacks."
        )

    extend = insert = remove = pop = clear = append
