"""Lightning's classes as they are: modules, data modules and callbacks that were written for its Trainer.

Lightning itself is never imported here: an object is known by the names of its classes.

adapt         an object of Lightning's becomes one of ours, in place
callbacks     Lightning's callbacks: those that a user wrote, and which of its own have a counterpart here
checkpoint    a checkpoint of Lightning's: what its hooks are shown of one, and what its classes load from a file
counterparts  what stands here for Lightning's own callbacks, and what those say then of the run
data          what a LightningDataModule finds on itself
hooks         methods that Lightning calls with something else than the engine
logger        what a LightningModule gives to a tracker
module        what a LightningModule calls on itself
optimizer     what `self.optimizers()` of a LightningModule gives
trainer       a Trainer under the names that Lightning's has
"""
