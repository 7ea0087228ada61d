"""Modules as people write them for Lightning that step their optimizers themselves."""

import lightning as L
import torch
from laws.lightning.style import Classifier
from torch import nn
from torch.nn import functional as F


class GAN(L.LightningModule):
    """Lightning's example: two optimizers, toggled in turn."""

    def __init__(self, latent_dim: int = 3, lr: float = 0.01, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 8), nn.LeakyReLU(0.2), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.validation_z = torch.linspace(-1, 1, 8 * latent_dim).reshape(8, latent_dim)

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def noise(self, imgs):
        return torch.randn(imgs.shape[0], self.hparams.latent_dim)

    def training_step(self, batch):
        imgs, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = self.noise(imgs).type_as(imgs)
        self.toggle_optimizer(optimizer_g)
        self.generated_imgs = self(z)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], []

    def on_validation_epoch_end(self):
        self.samples = self(self.validation_z.type_as(self.generator[0].weight))


class GridGAN(GAN):
    """The same with noise that is not drawn: Lightning and midstride draw random numbers in another order."""

    def noise(self, imgs):
        return self.validation_z[: imgs.shape[0]] * (self.global_step % 3)

    @property
    def global_step(self):
        return self.trainer.current_epoch


class Scheduled(GridGAN):
    """Two optimizers, each with a schedule: one a step, one an epoch."""

    def configure_optimizers(self):
        (opt_g, opt_d), _ = super().configure_optimizers()
        sch_g = torch.optim.lr_scheduler.StepLR(opt_g, step_size=3)
        sch_d = torch.optim.lr_scheduler.ExponentialLR(opt_d, gamma=0.9)
        return {"optimizer": opt_g, "lr_scheduler": sch_g}, {"optimizer": opt_d, "lr_scheduler": {"scheduler": sch_d}}

    def training_step(self, batch, batch_idx):
        super().training_step(batch)
        sch_g, sch_d = self.lr_schedulers()
        sch_g.step()
        if self.trainer.is_last_batch:
            sch_d.step()


class Toggled(GridGAN):
    """Steps with closures under `toggle_model`, and has its hands in backward passes and before steps."""

    def on_fit_start(self):
        self.both = self.optimizers()
        self.norms = []

    def training_step(self, batch):
        imgs, _ = batch
        opt_g, opt_d = self.optimizers()
        assert isinstance(opt_g, torch.optim.Adam)
        assert opt_g.optimizer is self.trainer.optimizers[0]
        z, valid = self.noise(imgs), torch.ones(imgs.size(0), 1)

        def closure_g():
            g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
            self.both[0].zero_grad()
            self.manual_backward(g_loss)
            return g_loss

        with opt_g.toggle_model(sync_grad=True):
            self.log("g_loss", opt_g.step(closure=closure_g))

        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), valid - 1)
        with opt_d.toggle_model():
            opt_d.zero_grad()
            self.manual_backward((real_loss + fake_loss) / 2)
            opt_d.step()
        opt_d.param_groups[0]["lr"] *= 0.99

    def backward(self, loss, *args, **kwargs):
        (loss * (1 + len(self.norms) / 100)).backward(*args, **kwargs)

    def on_before_backward(self, loss):
        self.norms.append(float(loss))

    def on_before_optimizer_step(self, optimizer):
        for group in optimizer.param_groups:
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(group["params"], 0.1)))


class Accumulated(Classifier):
    """Accumulates and clips by hand, with a graph that is kept for a second backward pass."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        x, y = batch
        loss = F.cross_entropy(self(x), y) / 2
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss * 0.1)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(opt, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            opt.step()
            opt.zero_grad()
        self.log("train_loss", loss)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class Plateau(Accumulated):
    """Steps its schedules by what the epoch that ends has logged."""

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()

    def on_train_epoch_end(self):
        self.lr_schedulers()[0].step(self.trainer.callback_metrics["loss"])

    def on_validation_epoch_end(self):
        self.lr_schedulers()[1].step(self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        schedules = [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.5, patience=0) for _ in range(2)]
        return [optimizer], schedules
