"""What a LightningDataModule finds on itself."""

from typing import TYPE_CHECKING, Any

from midstride.engine.lightning.trainer import LightningTrainer
from midstride.engine.modules.module import DataModule

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = ["LightningData"]


class LightningData(DataModule):
    """What stands in place of LightningDataModule's own methods, where the user has not written them."""

    _trainer: "list[TrainerInterface]"

    @property
    def trainer(self) -> Any:
        """The Trainer that reads these data, under Lightning's names; None before it does."""
        return LightningTrainer(self._trainer[0]) if self._trainer else None
