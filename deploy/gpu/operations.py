"""The operations that docs/gpu.md names: each is refused on a GPU, and what is named instead gives its numbers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ALLOWED", "REFUSED", "numbers"]

Operation = Callable[[Tensor], Tensor]

HOST = torch.device("cpu")

#: indices of pixels, with repetitions
_ROWS, _COLUMNS = torch.arange(4096).view(64, 64) % 3, torch.arange(4096).view(64, 64) % 5


def _ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-1], x.shape[-1], device=x.device)


def _index(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), device=x.device) % 4


def _bag(x: Tensor) -> Tensor:
    weight, rows = x.flatten().view(-1, 8), torch.tensor([[0, 1], [1, 3]], device=x.device)
    return F.embedding_bag(rows, weight, mode="max")


def _bag_by_hand(x: Tensor) -> Tensor:
    weight, rows = x.flatten().view(-1, 8), torch.tensor([[0, 1], [1, 3]], device=x.device)
    return F.embedding(rows, weight).amax(1)


def _ctc(x: Tensor, device: torch.device | None = None) -> Tensor:
    scores = x.flatten().view(16, 2, -1).log_softmax(-1).to(device or x.device)
    targets = torch.tensor([[1, 2], [2, 3]], device=scores.device)
    return F.ctc_loss(scores, targets, torch.tensor([16, 16]), torch.tensor([2, 2]))


def _pixels(x: Tensor) -> Tensor:
    rows, columns = _ROWS.to(x.device), _COLUMNS.to(x.device)
    return x[..., rows, columns]


def _grid(x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    where = torch.stack([(2 * _COLUMNS + 1) / width, (2 * _ROWS + 1) / height], -1).to(x.device) - 1
    return F.grid_sample(x, where.expand(len(x), *where.shape), align_corners=False)


def _unpool(x: Tensor) -> Tensor:
    pooled, where = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(pooled, where, 2)


def _labels(x: Tensor) -> Tensor:
    return torch.arange(x[:, 0].numel(), device=x.device).view(x[:, 0].shape) % x.shape[1]


#: how torch begins the name of an operation -> it, and what docs/gpu.md names instead; None where numbers differ
REFUSED: dict[str, tuple[Operation, list[Operation]]] = {
    "adaptive_avg_pool": (nn.AdaptiveAvgPool2d(2), [lambda x: F.avg_pool2d(x, x.shape[-1] // 2)]),
    "adaptive_max_pool": (nn.AdaptiveMaxPool2d(2), [lambda x: F.max_pool2d(x, x.shape[-1] // 2)]),
    "avg_pool3d": (nn.AvgPool3d(2), [lambda x: F.avg_pool2d(x, 2).unflatten(1, (-1, 2)).mean(2)]),
    "bincount": (
        lambda x: torch.bincount(_index(x), weights=x.detach().flatten()),
        [lambda x: torch.zeros(4, device=x.device).index_add(0, _index(x), x.detach().flatten())],
    ),
    "ctc_loss": (_ctc, [lambda x: _ctc(x, torch.device("cpu"))]),
    "cumsum": (lambda x: x.cumsum(-1), [lambda x: x.cpu().cumsum(-1), lambda x: x @ _ones(x).triu()]),
    "embedding_bag": (_bag, [_bag_by_hand]),
    "fractional_max_pool": (nn.FractionalMaxPool2d(2, 4), []),
    "grid_sampler": (_grid, [_pixels]),
    "histc": (
        lambda x: x.detach().histc(4, 0, 1),
        [
            lambda x: x.detach().cpu().histc(4, 0, 1),
            lambda x: torch.bincount(
                torch.bucketize(x.detach().flatten(), torch.tensor([0, 0.25, 0.5, 0.75, 1], device=x.device)),
                minlength=6,
            )[1:5].float(),
        ],
    ),
    "kthvalue": (lambda x: x.kthvalue(2, -1).values, [lambda x: x.sort(-1).values[..., 1]]),
    "max_unpool": (_unpool, []),
    "median": (lambda x: x.median(-1).values, [lambda x: x.sort(-1).values[..., (x.shape[-1] - 1) // 2]]),
    "nll_loss2d": (
        lambda x: F.cross_entropy(x, _labels(x)),
        [lambda x: F.cross_entropy(x.movedim(1, -1).flatten(0, -2), _labels(x).flatten())],
    ),
    "put_": (
        lambda x: x.clone().put_(_index(x), x.flatten(), accumulate=True),
        [lambda x: x.flatten().index_put((_index(x),), x.flatten(), accumulate=True).view_as(x)],
    ),
    "reflection_pad": (
        lambda x: F.pad(x, (1, 0, 0, 0), mode="reflect"),
        [lambda x: torch.cat([x[..., 1:2].flip(-1), x], -1)],
    ),
    "scatter": (
        lambda x: x.scatter_reduce(-1, torch.zeros_like(x, dtype=torch.long), x.detach(), "prod"),
        [],
    ),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), []),
}

#: what docs/gpu.md names as repeatable, for tensors of four dimensions
ALLOWED: dict[str, Operation] = {
    "linear": lambda x: F.linear(x, x[0, 0]),
    "convolution": lambda x: F.conv2d(x, x[:, :, :3, :3], padding=1),
    "transposed convolution": lambda x: F.conv_transpose2d(x, x[:, :, :3, :3].movedim(0, 1).contiguous()),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group norm": lambda x: F.group_norm(x, 2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "causal attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "attention in bf16": lambda x: F.scaled_dot_product_attention(*[x.bfloat16()] * 3),
    "embedding": lambda x: F.embedding(_index(x), x.flatten().view(-1, 8)),
    "embedding bag, mean": lambda x: F.embedding_bag(_index(x).view(-1, 2), x.flatten().view(-1, 8), mode="mean"),
    "embedding bag, sum": lambda x: F.embedding_bag(_index(x).view(-1, 2), x.flatten().view(-1, 8), mode="sum"),
    "max pool": lambda x: F.max_pool2d(x, 2),
    "average pool": lambda x: F.avg_pool2d(x, 2),
    "mean of pixels": lambda x: x.mean((-2, -1)),
    "maximum of pixels": lambda x: x.amax((-2, -1)),
    "scatter_add": lambda x: x.scatter_add(-1, torch.zeros_like(x, dtype=torch.long), x),
    "scatter_reduce, sum": lambda x: x.scatter_reduce(-1, torch.zeros_like(x, dtype=torch.long), x, "sum"),
    "index_add": lambda x: x.index_add(-1, torch.zeros(x.shape[-1], dtype=torch.long, device=x.device), x),
    "index_put": lambda x: x.index_put((_index(x)[:1],), x[:1], accumulate=True),
    "pixels by index": _pixels,
    "interpolate, nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "interpolate, bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad by replication": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "pad by a constant": lambda x: F.pad(x, (1, 1, 1, 1)),
    "cross entropy": lambda x: F.cross_entropy(
        x.flatten(0, -2), torch.zeros(x[..., 0].numel(), device=x.device).long()
    ),
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(2).values,
    "gather": lambda x: x.gather(-1, torch.zeros_like(x, dtype=torch.long)),
    "product": lambda x: x.prod(-1),
    "cumulative product": lambda x: x.cumprod(-1),
}


def numbers(operation: Operation, device: torch.device = HOST, side: int = 8) -> tuple[Tensor, Tensor]:
    """Return the result of `operation` on random images, and the gradient of the sum of its squares, both on the host.

    The gradient is zeros if the operation has none.

    Args:
        operation: a function of a tensor of four dimensions.
        device: where it is computed.
        side: height and width of an image, in pixels.
    """
    x = torch.rand(4, 4, side, side, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    out = operation(x)
    if out.requires_grad:
        out.square().sum().backward()
    slope = torch.zeros_like(x) if x.grad is None else x.grad
    return out.detach().cpu(), slope.cpu()
