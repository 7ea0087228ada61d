"""Support for modules, data modules and callbacks that were written for Lightning's Trainer.

Lightning itself is never imported here: its classes are recognized by name.

adapt         replaces the class of a Lightning object by one that the engine can run, in place; wraps its hooks
callbacks     callbacks derived from Lightning's Callback, and counterparts of Lightning's own
checkpoint    checkpoints in Lightning's format, for its hooks and for `load_from_checkpoint`
counterparts  the counterparts of Lightning's own callbacks, and the attributes of those after a run
lightning_internals  private names of Lightning
loggers       the counterparts of Lightning's own loggers
module        the methods of LightningModule and LightningDataModule, and the optimizers of `self.optimizers()`
results       the values of an evaluation, by name and as Lightning's list
trainer       a Trainer with the attributes of Lightning's

Tests: tests/unit/lightning, tests/laws/test_lightning.py
"""
