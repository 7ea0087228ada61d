"""Adapted and quantized modules: peft, bitsandbytes, torchao."""

from typing import Any

import bitsandbytes as bnb
import torch
from libraries.rows import Fitted, Row, vectors
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from torch import nn
from torchao import quantization
from torchao.optim import AdamW4bit, AdamW8bit
from torchao.quantization.qat import QATConfig


class Base(nn.Module):
    def __init__(self, second: nn.Module | None = None) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 64), second or nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: Any) -> Any:
        return self.three(self.two(self.one(x).relu()).relu())


class Adapted(Fitted):
    """A base that stays, and an adapter by `config`."""

    config: Any = LoraConfig(r=4, target_modules=["one", "two"])

    def layers(self) -> nn.Module:
        return get_peft_model(Base(), self.config)


class Dora(Adapted):
    config = LoraConfig(r=4, target_modules=["one", "two"], use_dora=True, use_rslora=True)


class Scaled(Adapted):
    config = IA3Config(target_modules=["one", "two"], feedforward_modules=["two"])


class Dropped(Adapted):
    config = LoraConfig(r=4, target_modules=["one"], lora_dropout=0.3, init_lora_weights="olora")


class Several(Adapted):
    """Two adapters that take turns by epochs, a third in the second epoch, weighted together and merged at the end."""

    def layers(self) -> nn.Module:
        net = super().layers()
        net.add_adapter("other", LoraConfig(r=4, target_modules=["two", "three"]))
        return net

    def on_train_epoch_start(self) -> None:
        self.net.set_adapter(["default", "other"][self.current_epoch % 2])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for name, one in self.named_parameters() if "lora" in name], lr=0.01)

    def on_train_end(self) -> None:
        self.net.set_adapter("default")
        self.net = self.net.merge_and_unload()


class Blended(Several):
    """The adapters become one, weighted, at the end."""

    def on_train_end(self) -> None:
        self.net.add_weighted_adapter(["default", "other"], [0.7, 0.3], "both", combination_type="cat")
        self.net.set_adapter("both")


class Allotted(Adapted):
    """AdaLoRA moves ranks between layers as it trains."""

    config = AdaLoraConfig(
        init_r=6, target_r=2, total_step=12, tinit=2, tfinal=2, deltaT=2, target_modules=["one", "two"]
    )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * sum(one.square().mean() for name, one in self.named_parameters() if "lora_E" in name)

    def on_train_batch_end(self, *_: Any) -> None:
        self.net.base_model.update_and_allocate(self.global_step)


class EightBits(Fitted):
    """bitsandbytes' optimizer `kind`."""

    kind = "AdamW8bit"

    def configure_optimizers(self) -> Any:
        return getattr(bnb.optim, self.kind)(self.parameters(), lr=0.01, min_8bit_size=1)


class Lion8(EightBits):
    kind = "Lion8bit"


class Mixed8(EightBits):
    kind = "AdEMAMix8bit"


class Scheduled8(EightBits):
    """With a schedule, and a module whose states have 32 bits."""

    def configure_optimizers(self) -> Any:
        manager = bnb.optim.GlobalOptimManager.get_instance()
        manager.initialize()  # of the process, which has trained others
        manager.register_module_override(self.net[2], "weight", {"optim_bits": 32})
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class QLora(Adapted):
    """Four bits below, an adapter above, eight bits of states."""

    kind = "nf4"

    def layers(self) -> nn.Module:
        quantized = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type=self.kind).to("cpu")
        return get_peft_model(Base(quantized), self.config)

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad]
        return bnb.optim.AdamW8bit(trained, lr=0.01, min_8bit_size=1)


class QDora(QLora):
    kind, config = "fp4", Dora.config


class Int8Base(Fitted):
    """torchao's integers below, a head above."""

    def layers(self) -> nn.Module:
        base = nn.Sequential(nn.Linear(8, 64), nn.ReLU()).requires_grad_(False)
        quantization.quantize_(base, quantization.Int8WeightOnlyConfig())
        return nn.Sequential(base, nn.Linear(64, 1))


class Aware(Fitted):
    """Trained as if it were quantized, and quantized at the end."""

    def layers(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        self.plan = quantization.Int8DynamicActivationIntxWeightConfig(torch.int4, quantization.granularity.PerGroup(8))
        quantization.quantize_(net, QATConfig(self.plan, step="prepare"))
        return net

    def on_train_end(self) -> None:
        quantization.quantize_(self.net, QATConfig(self.plan, step="convert"))


class Ao8(Fitted):
    kind: Any = AdamW8bit

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 16), nn.Tanh(), nn.Linear(16, 1))

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.01)


class Ao4(Ao8):
    kind = AdamW4bit


ROWS = {
    "peft, LoRA": Row(Adapted),
    "peft, DoRA": Row(Dora),
    "peft, IA3": Row(Scaled),
    "peft, dropout and OLoRA": Row(Dropped, draws=True),
    "peft, two adapters, merged": Row(Several),
    "peft, two adapters, weighted": Row(Blended),
    "peft, AdaLoRA": Row(Allotted),
    "bitsandbytes, AdamW8bit": Row(EightBits),
    "bitsandbytes, Lion8bit": Row(Lion8),
    "bitsandbytes, AdEMAMix8bit": Row(Mixed8),
    "bitsandbytes, some of 32 bits": Row(Scheduled8),
    # Without validations: on some processors these pack the weights in place for inference, and training fails.
    "bitsandbytes, QLoRA": Row(QLora, lambda: {"train": vectors()["train"]}),
    "bitsandbytes, fp4 and DoRA": Row(QDora, lambda: {"train": vectors()["train"]}),
    "torchao, int8": Row(Int8Base),
    "torchao, QAT": Row(Aware),
    "torchao, AdamW8bit": Row(Ao8),
    "torchao, AdamW4bit": Row(Ao4),
}
