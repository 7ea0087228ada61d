"""The methods of LightningDataModule."""

from typing import TYPE_CHECKING, Any

from midstride.engine.lightning.trainer import LightningTrainer
from midstride.engine.modules.module import DataModule

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = ["LightningData"]


class LightningData(DataModule):
    """Replaces the methods of LightningDataModule that the user has not overridden."""

    _trainer: "list[TrainerInterface]"

    @property
    def trainer(self) -> Any:
        """The Trainer that reads these data, with the attributes of Lightning's Trainer; None before it does."""
        return LightningTrainer(self._trainer[0]) if self._trainer else None
