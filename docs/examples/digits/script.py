"""The digits without a job file and without Prefect: a script that resumes when it is started again."""

from pathlib import Path

from model import Classifier, Digits

from midstride.engine import BestCheckpoint, Trainer

if __name__ == "__main__":
    trainer = Trainer(
        max_epochs=40, seed=7, snapshots={"every_steps": 50}, callbacks=[BestCheckpoint("val/loss", "min")]
    )
    module, data = Classifier(), Digits(batch_size=32)
    trainer.fit(module, data, run=str(Path(__file__).parent / "runs" / "script"))
    print(trainer.test(module, data, ckpt_path="best"))
