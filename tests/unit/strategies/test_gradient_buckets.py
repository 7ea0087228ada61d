"""What ranks tell each other of their gradients does not depend on when they do, in the backward pass or after it."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from midstride.engine.errors import NotExact
from midstride.engine.strategies.gradient_buckets import GradientBuckets


@dataclass
class Network:
    """Of one rank: it notes what is sent, and in place of a sum of several doubles it."""

    is_busy: bool = False
    sent: list[tuple[str, Tensor]] = field(default_factory=list)

    def start(self, flat: Tensor, name: str) -> "Network":
        self.sent.append((name, flat.clone()))
        flat *= 2
        return self

    def is_completed(self) -> bool:
        return not self.is_busy

    def wait(self) -> None:
        """It is there."""


class Net(nn.Module):
    """Four layers, one of them in use twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, self.layers[1]]:
            x = layer(x).tanh()
        return x


class Repeated(Net):
    """The third layer's gradient becomes ready twice in a backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=True) if number == 2 else layer(x)
        return checkpoint(self.layers[2], x, use_reentrant=True).tanh()


def freeze(net: Net, step: int) -> None:
    """Train other layers in the second step, as with several optimizers."""
    net.layers[step % 2].requires_grad_(step != 1)


@dataclass
class Case:
    net: type[Net] = Net
    network: Callable[[], Network] = Network
    change: Callable[[Net, int], object] = lambda net, step: None
    flags: bool = True
    early: bool = True


CASES = {
    "as it is": Case(),
    "flags beside": Case(flags=False),
    "a network that is busy": Case(network=lambda: Network(is_busy=True)),
    "other parameters each time": Case(change=freeze),
    "ready twice": Case(net=Repeated),
}


def train(case: Case, *, in_backward: bool, bucket_bytes: int = 80) -> tuple[Net, Network, int]:
    """Return the net after four steps, what was sent, and how often before the end of a backward pass."""
    net, network, early = case.net(), case.network(), 0
    buckets = GradientBuckets(network.start, 2, None if case.flags else list, bucket_bytes)
    for step in range(4):
        case.change(net, step)
        loss = net(torch.full((2, 4), 1.0 + step, requires_grad=True)).square().sum()
        if in_backward:
            before = len(network.sent)
            with buckets.backward(net.parameters()):
                loss.backward()
            early += len(network.sent) - before
        else:
            loss.backward()
        buckets.average(net.parameters())
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
    return net, network, early


@pytest.mark.parametrize("case", CASES)
def test_what_is_sent_is_the_same_whenever_it_is_sent(case: str) -> None:
    (net, sent, early), (other, later, none) = (train(CASES[case], in_backward=there) for there in (True, False))
    assert early > 0
    assert none == 0
    assert [name for name, _ in sent.sent] == [name for name, _ in later.sent]
    assert all(one.equal(another) for (_, one), (_, another) in zip(sent.sent, later.sent, strict=True))
    for parameter, like in zip(net.parameters(), other.parameters(), strict=True):
        assert parameter.equal(like)


def test_a_small_net_is_one_bucket_in_parameter_order() -> None:
    net = Net()
    network = Network()
    for number, parameter in enumerate(net.layers.parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    GradientBuckets(network.start).average(net.parameters())
    ((_, flat),) = network.sent
    gradients = [torch.zeros(3), *(p.grad.reshape(-1) / 2 for p in net.layers.parameters() if p.grad is not None)]
    assert flat.equal(torch.cat([*gradients, torch.tensor([0.0] + [1.0] * 8)]))
    assert net.unused.grad is None


@pytest.mark.parametrize("since", [0, 1])
def test_a_gradient_that_changes_after_it_was_sent_is_refused(since: int) -> None:
    """From the first step on, it is known to, and is sent later."""
    net, network = Net(), Network()
    buckets = GradientBuckets(network.start, bucket_bytes=80)
    for step in range(2):
        with buckets.backward(net.parameters()):
            net(torch.ones(2, 4)).sum().backward()
        if step >= since:
            for parameter in net.layers[3].parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2)
        with pytest.raises(NotExact, match="changed after") if step and since else nullcontext():
            buckets.average(net.parameters())
