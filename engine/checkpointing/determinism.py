"""Deterministic algorithms of torch, switched on while a fit runs."""

import os
import re
import traceback
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import nn
from torch.backends.cudnn import set_flags

from midstride.engine.errors import NotExact, UserError

__all__ = ["REPEATABLE", "Determinism", "refuse_cudnn_dropout", "repeatable_form"]

#: prefix of torch's name of an operation that is not deterministic on a GPU -> what uses it, and a substitute
REPEATABLE: dict[str, tuple[str, str]] = {
    "adaptive_avg_pool": ("nn.AdaptiveAvgPool", "x.mean((-2, -1)) for an output of size 1, nn.AvgPool2d for others"),
    "adaptive_max_pool": ("nn.AdaptiveMaxPool", "x.amax((-2, -1)) for an output of size 1, nn.MaxPool2d for others"),
    "avg_pool3d": ("nn.AvgPool3d", "nn.AvgPool2d over height and width, and a mean over depth"),
    "bincount": ("torch.bincount with weights", "torch.zeros(n).index_add(0, values, weights)"),
    "ctc_loss": ("nn.CTCLoss", "the same on the host: F.ctc_loss(log_probs.cpu(), targets.cpu(), ...)"),
    "cumsum": ("torch.cumsum of fractions", "x.cpu().cumsum(dim), or x @ torch.ones(n, n).triu() along the last one"),
    "embedding_bag": ("nn.EmbeddingBag with mode='max'", "mode='sum' or 'mean', or nn.Embedding and amax"),
    "fractional_max_pool": ("nn.FractionalMaxPool", "nn.MaxPool2d or nn.MaxPool3d"),
    "grid_sampler": ("F.grid_sample", "pixels by index, x[..., rows, columns], weighted by hand; or no gradient there"),
    "histc": ("torch.histc", "torch.bucketize and torch.bincount without weights, or x.cpu().histc(...)"),
    "kthvalue": ("torch.kthvalue", "x.sort(dim), and its k-th entries"),
    "max_unpool": ("nn.MaxUnpool", "F.interpolate(mode='nearest'), or nn.ConvTranspose2d"),
    "median": ("torch.median with a dimension", "x.sort(dim), and the middle of it"),
    "nll_loss2d": ("F.cross_entropy of images", "F.cross_entropy(x.movedim(1, -1).flatten(0, -2), target.flatten())"),
    "put_": ("Tensor.put_", "Tensor.index_put, or scatter"),
    "reflection_pad": ("padding by reflection", "F.pad(mode='replicate') or 'constant', or torch.cat with x.flip(...)"),
    "scatter": ("scatter_reduce with reduce='prod'", "reduce='sum' of logarithms, or scatter_add, or index_add"),
    "upsample": ("F.interpolate, nn.Upsample", "mode='nearest' or nn.ConvTranspose2d; of 4 dimensions also 'bilinear'"),
}

_REFUSED = re.compile(r"(\w[\w ]*?)(?: with indices output)? does not have a deterministic implementation")
#: characters of an error's text that are searched
_SEARCHED_CHARS = 1000
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_WAY_ON = (
    "Or set deterministic=False (in a job trainer.deterministic: false): then the last bits of a resumed run can differ"
)


class Determinism:
    """Context manager that switches torch to deterministic algorithms, and back.

    Args:
        chosen: the user's choice; None uses `on`.
        on: whether deterministic algorithms are needed, since snapshots are taken.
        benchmark: whether cuDNN measures which algorithms are fastest; None leaves it as it is.
    """

    def __init__(self, chosen: bool | None, *, on: bool, benchmark: bool | None = None) -> None:
        self._on, self._benchmark = on if chosen is None else chosen, benchmark

    def __enter__(self) -> None:
        """Switch.

        Raises:
            UserError: `benchmark` would choose the algorithms of a fit that needs deterministic ones.
        """
        if self._benchmark and self._on and torch.cuda.device_count():
            raise UserError(
                "benchmark=True lets each attempt choose its fastest algorithms, so a resumed run could have other "
                f"bits. Leave it out. {_WAY_ON}"
            )
        self._before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
        if self._on:
            if torch.cuda.device_count():  # unlike is_available, it does not keep this process from forking GPU ranks
                # cuBLAS reads this when it is first used; without it torch refuses deterministic algorithms.
                os.environ.setdefault(_CUBLAS, ":4096:8")
            # use_deterministic_algorithms(True) does the same, but imports the compiler first: 2.5 s.
            torch.set_deterministic_debug_mode("error")
            set_flags(_benchmark=False)
        if self._benchmark is not None:
            set_flags(_benchmark=self._benchmark)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Switch back.

        Raises:
            UserError: an operation has no deterministic implementation; it is named, with a substitute if one is known.
        """
        mode, measured = self._before
        set_flags(_benchmark=measured)
        torch.set_deterministic_debug_mode(mode)
        if self._on and isinstance(error, Exception) and (message := _explanation(error)):
            raise UserError(message) from error


def refuse_cudnn_dropout(module: nn.Module) -> None:
    """Refuse layers of `module` with dropout by cuDNN, if algorithms have to be deterministic.

    torch.cuda.get_rng_state does not hold the state of cuDNN's generator for the dropout of recurrent layers.

    Raises:
        NotExact: there are such layers; they are named.
    """
    if not torch.are_deterministic_algorithms_enabled() or not torch.backends.cudnn.enabled:
        return
    drawing = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.RNNBase) and layer.dropout and layer.num_layers > 1 and layer.training
        if any(weight.is_cuda for weight in layer.parameters())
    ]
    if drawing:
        raise NotExact(
            f"the module's {', '.join(drawing)}: on a GPU, dropout between recurrent layers is drawn by cuDNN from a "
            "generator that no snapshot can hold. Stack single layers of nn.LSTM, nn.GRU or nn.RNN with nn.Dropout "
            "between them, or set torch.backends.cudnn.enabled = False before the fit (slower). "
            f"{_WAY_ON}"
        )


def repeatable_form(name: str) -> str:
    """Return a sentence with a substitute of the operation `name`; "" if none is known."""
    known = next((row for start, row in REPEATABLE.items() if name.lstrip("_").startswith(start)), None)
    return f"Instead of {known[0]}, this is: {known[1]}." if known else ""


def _explanation(error: BaseException) -> str:
    """Return a message with advice if torch refused a nondeterministic operation, else ""."""
    for cause in _causes(error):
        if not isinstance(cause, RuntimeError):
            continue
        # str(cause) may call user code, and raise; torch names the operation at the beginning.
        said = "".join(traceback.format_exception_only(cause))[:_SEARCHED_CHARS]
        if found := _REFUSED.search(said):
            name = found[1].strip()
            instead = f" {known}" if (known := repeatable_form(name)) else ""
            return (
                f"{name}, an operation of the module on this device, gives other bits each time, but this fit "
                f"promises equal ones.{instead} {_WAY_ON}. Common layers: docs/gpu.md"
            )
        if _CUBLAS in said:
            return (
                f"cuBLAS was in use before this fit, without {_CUBLAS}=:4096:8, and would give other bits each time: "
                f"set that variable before the program starts, or use no GPU before the fit. {_WAY_ON}"
            )
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error`, its cause, and so on, each once, since causes may form a cycle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
