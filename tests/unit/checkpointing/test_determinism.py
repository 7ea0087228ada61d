"""What is not repeatable ends a fit by name, with what is repeatable instead."""

import re
from pathlib import Path

import pytest
import torch
from support.refused import fit
from torch import Tensor, nn

from midstride.engine.checkpointing.determinism import REPEATABLE, Determinism
from midstride.engine.errors import UserError


def unpooled(x: Tensor) -> Tensor:
    pooled, where = nn.MaxPool2d(2, return_indices=True)(x)
    return nn.MaxUnpool2d(2)(pooled, where)


def put(x: Tensor) -> Tensor:
    return x.clone().put_(torch.tensor([0]), torch.ones(1))


#: refused by torch on the CPU as well; what the message has to say
REFUSED = {
    "max unpooling": (unpooled, ["max_unpooling2d", "nn.MaxUnpool", "F.interpolate(mode='nearest')"]),
    "put_": (put, ["put_", "Tensor.index_put"]),
}
#: what torch says of operations on a GPU
SAID = {
    "adaptive_avg_pool2d_backward_cuda": "x.mean((-2, -1))",
    "upsample_bilinear2d_backward_out_cuda": "mode='nearest'",
    "cumsum_cuda_kernel": "x.cpu().cumsum(dim)",
    "ctc_loss_backward_gpu": "F.ctc_loss(log_probs.cpu()",
    "median CUDA with indices output": "x.sort(dim)",
    "_histc_cuda": "torch.bucketize",
    "grid_sampler_2d_backward_cuda": "x[..., rows, columns]",
    "nll_loss2d_forward_out_cuda_template": "movedim",
    "reflection_pad2d_backward_cuda": "replicate",
    "something_new_cuda": "deterministic=False",
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unrepeatable_operation_is_named_with_an_alternative(case: str) -> None:
    operation, words = REFUSED[case]
    with pytest.raises(UserError) as caught, Determinism(None, on=True):
        operation(torch.rand(1, 1, 4, 4))
    assert all(word in str(caught.value) for word in [*words, "deterministic=False", "docs/gpu.md"]), caught.value
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.parametrize("said", SAID)
def test_what_torch_says_on_a_gpu_is_understood(said: str) -> None:
    words = f"{said} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms"
    with pytest.raises(UserError, match=re.escape(SAID[said])) as caught, Determinism(True, on=False):
        raise RuntimeError(words)
    assert said.removesuffix(" with indices output").strip("_") in str(caught.value)


def test_cublas_that_was_used_before_is_named() -> None:
    words = "this operation is not deterministic because it uses CuBLAS ... set CUBLAS_WORKSPACE_CONFIG=:4096:8"
    with pytest.raises(UserError, match="before the program starts"), Determinism(None, on=True):
        raise RuntimeError(words)


OTHERS: list[tuple[bool, BaseException]] = [
    (False, RuntimeError("put_ does not have a deterministic implementation")),
    (True, RuntimeError("another")),
    (True, ValueError("put_ does not have a deterministic implementation")),
    (True, KeyboardInterrupt()),
]


@pytest.mark.parametrize(("chosen", "error"), OTHERS, ids=repr)
def test_other_errors_stay_what_they_are(chosen: bool, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, Determinism(chosen, on=True):
        raise error
    assert caught.value is error


def test_a_run_that_resumes_with_other_algorithms_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path)
    fit(tmp_path, max_epochs=2)
    assert not [message for message in caplog.messages if "deterministic" in message]
    fit(tmp_path, max_epochs=3, deterministic=False)
    said = "deterministic was True and is False: sums may differ in their last bits from here on"
    assert [message for message in caplog.messages if "deterministic" in message] == [said]


def test_the_page_has_every_row() -> None:
    page = (Path(__file__).parents[3] / "docs/gpu.md").read_text()
    for layer, instead in REPEATABLE.values():
        assert layer in page
        assert instead in page
