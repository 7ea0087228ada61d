"""The recorder: keeps a fit's state in its run, and gives it back."""

import json
import logging
from typing import TYPE_CHECKING, Any, Literal

from midstride.engine.attributes import Attributes
from midstride.engine.callbacks import Callbacks
from midstride.engine.data.loader import ExactLoader
from midstride.engine.hooks import calling
from midstride.engine.identity import (
    FREE_ARGUMENTS,
    bits_of,
    changed_bits,
    check_identity,
    check_world_size,
    described,
    is_json,
)
from midstride.engine.module import TrainingModule
from midstride.engine.optimizers import OptimizerList, SchedulerList
from midstride.engine.options import SnapshotOptions
from midstride.engine.run import Resume, Run
from midstride.engine.seeds import Generators
from midstride.engine.snapshots.codec import encode
from midstride.engine.snapshots.place import Place
from midstride.engine.snapshots.policy import Policy
from midstride.engine.state import Stateful, restore_parts, state_of

if TYPE_CHECKING:
    from midstride.engine.trainer import Trainer

__all__ = ["Recorder"]

log = logging.getLogger(__name__)

#: options that decide which samples make a step, and what a step is
DECIDING = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "val_check_interval",
    "limit_train_batches",
    "limit_val_batches",
    "use_distributed_sampler",
)


class Recorder:
    """Takes the snapshots of one fit and resumes from them.

    Args:
        trainer: whose parts are kept, put together and ready to train.
        url: folder or URL of the run.
        options: when snapshots are taken.
        loader: the training loader, for what decides the order of samples.
        data: where it came from.
    """

    def __init__(
        self, trainer: "Trainer", url: str, options: SnapshotOptions, loader: ExactLoader, data: object
    ) -> None:
        self._trainer = trainer
        self.run = Run(url, trainer.strategy, options.keep)
        self._policy = Policy(options, trainer.strategy.gather)
        self._parts = _parts(trainer)
        self._facts = self._described(loader, data)

    @staticmethod
    def try_encoding(trainer: "Trainer") -> None:
        """Raise what a snapshot of `trainer` would raise for state that cannot be written."""
        encode(state_of(_parts(trainer)))

    def resume(self, resume: Resume) -> bool:
        """Take the state back from the newest good snapshot; return whether there was one."""
        found = self.run.resume(resume)
        if found is not None:
            snapshot, tree = found
            where = f"{self.run.store.url}/snapshots/{snapshot.name}"
            self._check(snapshot.manifest, where)
            restore_parts(self._parts, tree)
        else:
            self.try_encoding(self._trainer)  # what cannot be written is refused now, not at the first snapshot
        lease = self.run.begin(found[0] if found else None)
        self._tell(lease.generation, lease.resumed_from)
        self.run.write("run.json", json.dumps({"run": self.run.name, **self._facts}, indent=2))
        return found is not None

    @property
    def generation(self) -> int | None:
        """Which life of the run this is, from 1."""
        return self.run.lease.generation if self.run.lease is not None else None

    def boundary(self) -> None:
        """Take a snapshot if one is due at this boundary."""
        progress = self._trainer.progress
        if self._policy.is_due(progress.val_batch if progress.validating else progress.step):
            self.take()

    def take(self) -> None:
        """Take a snapshot here and now; every rank calls this at the same place."""
        trainer, progress = self._trainer, self._trainer.progress
        place = Place(progress.step, progress.after)
        rows = trainer.logged.take_rows()
        facts = {**self._facts, "progress": progress.state_dict()}
        snapshot, stall_s = self.run.snapshot(place, state_of(self._parts), rows, facts, trainer.strike)
        self._policy.taken(stall_s)
        trainer.reporter.emit(
            "snapshot",
            name=snapshot.name,
            step=progress.step,
            epoch=progress.epoch,
            bytes=snapshot.bytes,
            stall_s=stall_s,
        )

    def finish(self) -> None:
        """Commit the end of the fit, with the last weights and the whole metric log."""
        trainer = self._trainer
        if not trainer.logged.rows.is_closed:
            trainer.progress.after += 1  # a boundary of its own: a snapshot may already stand at the last one
            trainer.logged.rows.close()
            self.take()
        self.save_weights("last")
        self.run.assemble_metric_log()
        self.run.close()

    def save_weights(self, folder: Literal["best", "last"]) -> None:
        """Replace the weights in `folder`."""
        trainer = self._trainer
        module = trainer.module
        facts = {
            "step": trainer.progress.step,
            "epoch": trainer.progress.epoch,
            "module": f"{type(module).__module__}:{type(module).__qualname__}",
            "hparams": {name: value for name, value in module.hparams.items() if is_json(value)},
            "hparams_left_out": [name for name, value in module.hparams.items() if not is_json(value)],
            "metrics": {name: float(value) for name, value in trainer.logged.values.items()},
        }
        self.run.save_weights(folder, module.state_dict(), facts)

    def _described(self, loader: ExactLoader, data: object) -> dict[str, Any]:
        """Return what makes this run this run, and what may change its last bits."""
        trainer = self._trainer
        given = dict(trainer.identity)
        arguments = given.pop("data_args", {})
        order, options = loader.order, trainer.options
        identity = {
            "module": f"{type(trainer.module).__module__}:{type(trainer.module).__qualname__}",
            "module_args": trainer.module.hparams,
            "data": type(data).__qualname__,
            **given,
            "data_args": {key: value for key, value in arguments.items() if key not in FREE_ARGUMENTS},
            "seed": trainer.seed,
            "global_batch_size": loader.batch_size * order.size * options.accumulate_grad_batches,
            "batch_size": loader.batch_size,
            "samples": order.samples,
            "drop_last": order.drop_last,
            "shuffle": getattr(order, "shuffle", False),
            **{name: getattr(options, name) for name in DECIDING},
            "precision": trainer.options.precision,
            "strategy": trainer.strategy.name,
        }
        return {"identity": described(identity), "bits": bits_of([type(trainer.module)], trainer.device)}

    def _check(self, manifest: dict[str, Any], where: str) -> None:
        saved, world = manifest["facts"], self._trainer.world
        check_identity(saved["identity"], self._facts["identity"], where=where, accepted=self._trainer.accept_change)
        check_world_size(manifest["world_size"], world.size, where=where)
        if world.is_first:
            for line in changed_bits(saved["bits"], self._facts["bits"]):
                log.warning("%s", line)

    def _tell(self, generation: int, resumed_from: str | None) -> None:
        trainer = self._trainer
        if resumed_from is None or not trainer.world.is_first:
            return
        log.info("generation %d resumes from snapshot %s", generation, resumed_from)
        trainer.reporter.emit("resumed", generation=generation, resumed_from=resumed_from, step=trainer.progress.step)


def _parts(trainer: "Trainer") -> dict[str, Stateful]:
    """Return everything that decides how a fit goes on, in the order in which it is given back.

    The strategy goes first: replaying its sums must not touch what is loaded after it. The generators go
    last: building and loading the others may draw numbers.
    """
    return {
        "strategy": trainer.strategy,
        "progress": trainer.progress,
        "module": trainer.module,
        "optimizers": OptimizerList(trainer.optimizers),
        "schedulers": SchedulerList(trainer.schedulers),
        "precision": trainer.precision,
        "callbacks": Callbacks(trainer.callbacks),
        "logged": trainer.logged,
        "metrics": trainer.logged.metrics,
        "gradients": Gradients(trainer.module),
        "modes": trainer.modes,
        "attributes": Attributes(trainer.module),
        "user": UserState(trainer.module),
        "generators": Generators(),
    }


class Gradients:
    """What a window that is still open has collected, on this rank; empty between steps."""

    def __init__(self, module: TrainingModule) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients there are, by parameter."""
        return {name: p.grad for name, p in self._module.named_parameters() if p.grad is not None}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Put them back."""
        for name, parameter in self._module.named_parameters():
            parameter.grad = state_dict[name].to(parameter.device) if name in state_dict else None


class UserState:
    """What the user's `on_save_checkpoint` puts in."""

    def __init__(self, module: TrainingModule) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """Ask the module for it."""
        state: dict[str, Any] = {}
        calling(f"{type(self._module).__name__}.on_save_checkpoint", self._module.on_save_checkpoint, state)
        return state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Give it back to the module."""
        calling(f"{type(self._module).__name__}.on_load_checkpoint", self._module.on_load_checkpoint, state_dict)
