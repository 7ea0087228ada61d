"""Models, losses and schedules of noise from libraries."""

from typing import Any

import gpytorch
import kornia.augmentation as augmentation
import segmentation_models_pytorch as smp
import timm
import torch
import torchdiffeq
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from libraries.rows import Fitted, Row, draws, loader
from lightly.loss import NTXentLoss
from lightly.models.utils import update_momentum
from monai.inferers import SlidingWindowInferer
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from neuralop.models import FNO
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader
from torch_geometric.nn import GCNConv, global_mean_pool
from transformers import GPT2Config, GPT2LMHeadModel
from vector_quantize_pytorch import VectorQuantize
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper


def pictures() -> dict[str, Any]:
    """Return loaders of 12 and 4 pictures with 3 channels of 32 x 32 pixels, and a mask for each."""
    x = draws(16, 3, 32, 32)
    y = (x.sum(dim=1, keepdim=True) > 0).float()
    return {"train": loader(x[:12], y[:12]), "val": loader(x[12:], y[12:])}


def labelled() -> dict[str, Any]:
    """Return loaders of vectors, with one of four classes for each."""
    x = draws(32, 8)
    y = torch.arange(32) % 4
    return {"train": loader(x[:24], y[:24], batch_size=8), "val": loader(x[24:], y[24:])}


def texts() -> dict[str, Any]:
    """Return loaders of 24 and 8 texts of 12 tokens."""
    tokens = torch.randint(0, 20, (32, 12), generator=torch.Generator().manual_seed(0))
    return {"train": loader(tokens[:24]), "val": loader(tokens[24:])}


class Segmenter(Fitted):
    def layers(self) -> nn.Module:
        self.loss = smp.losses.DiceLoss("binary")
        encoder = "timm-mobilenetv3_small_minimal_100"
        return smp.Unet(encoder, encoder_weights=None, decoder_channels=(32, 16, 16, 16, 16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        counts = smp.metrics.get_stats(self.net(batch[0]), batch[1].long(), mode="binary", threshold=0.5)
        self.log("iou", smp.metrics.iou_score(*counts, reduction="micro"))


class Operator(Fitted):
    """A neural operator, whose state_dict holds its arguments."""

    def layers(self) -> nn.Module:
        return FNO(n_modes=(4, 4), in_channels=3, out_channels=1, hidden_channels=8, n_layers=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.net(batch[0]), batch[1])


class Volumes(Fitted):
    """MONAI's net, loss, cumulative metric and windows."""

    def layers(self) -> nn.Module:
        self.loss, self.dice = DiceCELoss(sigmoid=True), DiceMetric(include_background=True, reduction="mean")
        self.windows = SlidingWindowInferer(roi_size=(16, 16), overlap=0.25)
        return UNet(2, 3, 1, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, norm="batch")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.dice(y_pred=(self.windows(batch[0], self.net) > 0).float(), y=batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("dice", self.dice.aggregate().item())
        self.dice.reset()


class Augmented(Fitted):
    """kornia's augmentations, of a batch on its device."""

    def layers(self) -> nn.Module:
        self.augment = augmentation.AugmentationSequential(
            augmentation.RandomHorizontalFlip(p=0.5),
            augmentation.ColorJitter(0.1, 0.1, 0.1, 0.1, p=0.8),
            augmentation.RandomAffine(10.0),
            data_keys=["input", "mask"],
        )
        return nn.Conv2d(3, 1, 3, padding=1)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.augment(*batch) if self.trainer.training else batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.net(batch[0]), batch[1])


class Metric(Fitted):
    """A loss with weights, pairs by a miner and a memory of earlier batches."""

    def layers(self) -> nn.Module:
        self.proxies = losses.ProxyAnchorLoss(num_classes=4, embedding_size=8)
        self.mine = miners.MultiSimilarityMiner()
        self.memory = losses.CrossBatchMemory(losses.NTXentLoss(), embedding_size=8, memory_size=20)
        return nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        embedded = self.net(batch[0])
        pairs = self.mine(embedded, batch[1])
        return self.proxies(embedded, batch[1], pairs) + self.memory(embedded, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.proxies(self.net(batch[0]), batch[1]))


class Words(Fitted):
    def layers(self) -> nn.Module:
        decoder = Decoder(dim=16, depth=2, heads=2, rotary_pos_emb=True, ff_glu=True, attn_dim_head=8)
        return AutoregressiveWrapper(TransformerWrapper(num_tokens=20, max_seq_len=12, attn_layers=decoder))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]))


class Gpt(Fitted):
    """A model of transformers, with dropout."""

    def layers(self) -> nn.Module:
        return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=12, n_embd=16, n_layer=2, n_head=2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(input_ids=batch[0], labels=batch[0]).loss)


class Timm(Fitted):
    """Dropped paths."""

    def layers(self) -> nn.Module:
        return timm.create_model("test_vit", num_classes=1, img_size=32, drop_path_rate=0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1].mean(dim=(2, 3)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_mean", self.net(batch[0]).mean())


class Quantizing(Fitted):
    """A codebook by moving averages, which begins with k-means and draws its dead codes anew."""

    def layers(self) -> nn.Module:
        self.codes = VectorQuantize(dim=8, codebook_size=8, kmeans_init=True, threshold_ema_dead_code=2, decay=0.8)
        return nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        quantized, _, commitment = self.codes(self.net(batch[0]))
        return F.mse_loss(quantized, batch[0]) + commitment.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_code", self.codes(self.net(batch[0]))[1].float().mean())


class Contrasted(Fitted):
    """lightly's loss with a bank of negatives, and a momentum encoder."""

    def layers(self) -> nn.Module:
        self.momentum = nn.Linear(8, 8).requires_grad_(False)
        self.loss = NTXentLoss(memory_bank_size=(16, 8))
        return nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        update_momentum(self.net, self.momentum, m=0.9)
        return self.loss(self.net(batch[0]), self.momentum(batch[0]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("negatives", self.loss.memory_bank.bank.mean())


class Flow(Fitted):
    """A differential equation, with the adjoint method."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = nn.Linear(8, 8), 0

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            return self.net(y).tanh()

    def layers(self) -> nn.Module:
        return self.Field()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torchdiffeq.odeint_adjoint(self.net, batch[0], torch.tensor([0.0, 1.0]))[-1].square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("calls", float(self.net.calls))


class Graphs(Fitted):
    def layers(self) -> nn.Module:
        self.graph = GCNConv(4, 8, cached=False)
        return nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        nodes = self.graph(batch.x, batch.edge_index).relu()
        return F.mse_loss(self.net(global_mean_pool(nodes, batch.batch)), batch.y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=batch.num_graphs)


def graphs() -> dict[str, Any]:
    """Return loaders of 24 and 4 rings of five nodes."""
    ring = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
    found = [Data(x=draws(5, 4, seed=one), edge_index=ring, y=draws(1, 1, seed=one)) for one in range(28)]
    return {"train": GraphLoader(found[:24], batch_size=4, shuffle=True), "val": GraphLoader(found[24:], batch_size=4)}


class Denoiser(Fitted):
    """diffusers' net, schedule of noise and average."""

    def layers(self) -> nn.Module:
        self.noise = DDPMScheduler(num_train_timesteps=50)
        kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}
        net = UNet2DModel(32, 3, 3, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, **kinds)
        self.average = EMAModel(net.parameters(), decay=0.9, use_ema_warmup=True)
        return net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise, steps = torch.randn_like(batch[0]), torch.randint(0, 50, (len(batch[0]),))
        return F.mse_loss(self.net(self.noise.add_noise(batch[0], noise, steps), steps).sample, noise)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.step(self.net.parameters())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("average", self.average.shadow_params[0].mean())


class Process(Fitted):
    """A Gaussian process by variation."""

    class Inner(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            points = draws(6, 8, seed=1)
            posterior = gpytorch.variational.CholeskyVariationalDistribution(6)
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, posterior))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def layers(self) -> nn.Module:
        net = self.Inner()
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, net, num_data=24)
        return net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return -self.bound(self.net(batch[0]), batch[1].squeeze(1))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_mean", self.likelihood(self.net(batch[0])).mean.mean())


ROWS = {
    "segmentation_models_pytorch": Row(Segmenter, pictures),
    "neuraloperator": Row(Operator, pictures),
    "MONAI": Row(Volumes, pictures),
    "kornia, augmentations": Row(Augmented, pictures, draws=True),
    "pytorch-metric-learning": Row(Metric, labelled),
    "x_transformers": Row(Words, texts),
    "transformers, GPT-2": Row(Gpt, texts, draws=True),
    "timm, dropped paths": Row(Timm, pictures, draws=True),
    "vector-quantize-pytorch": Row(Quantizing, labelled, draws=True),
    "lightly": Row(Contrasted, labelled),
    "torchdiffeq": Row(Flow),
    "torch_geometric": Row(Graphs, graphs, draws=True),
    "diffusers": Row(Denoiser, pictures, draws=True),
    "gpytorch": Row(Process, draws=True),
}
