"""Whose an exception is that comes out of the user's code: theirs, or that of a rank that is gone."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from midstride.engine.errors import UserCodeError
from midstride.engine.user_code import call_user_code

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12724"


class HorovodInternalError(RuntimeError):
    """Stands in for Horovod's, which is not installed everywhere."""


def raised(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def while_another_is_handled() -> None:
    try:
        raise RuntimeError(GLOO)
    except RuntimeError:
        raise KeyError("loss")  # noqa: B904 - as it happens in an `except` of the user's


def after_another_was_handled() -> None:
    try:
        raise KeyError("loss")
    except KeyError as error:
        raise RuntimeError("no loss") from error


def of_a_cut_tensor() -> None:
    """An optimizer that torch has not taught to step tensors that are cut."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)]))
        weight.grad = torch.ones_like(weight)
        torch.optim.Rprop([weight]).step()
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    "function",
    [
        raised(RuntimeError(GLOO)),  # where `work.wait()` of the user's raises it, no frame is torch's
        raised(distributed.DistBackendError("NCCL error: remote process exited")),
        raised(HorovodInternalError("ncclCommAbort")),
        while_another_is_handled,
    ],
)
def test_an_error_of_an_exchange_is_not_the_users(function: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, KeyError)) as caught:
        call_user_code("Module.training_step", function)
    assert not isinstance(caught.value, UserCodeError)


@pytest.mark.parametrize("function", [after_another_was_handled, raised(RuntimeError("timed out")), of_a_cut_tensor])
def test_any_other_is_the_users(function: Callable[[], Any]) -> None:
    with pytest.raises(UserCodeError, match=r"raised in Module\.training_step"):
        call_user_code("Module.training_step", function)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (SystemExit(), 0, ""),
        (SystemExit(3), 3, ""),
        (SystemExit("why"), 1, "why"),
        (ValueError("no"), 1, "ValueError: no"),
    ],
)
def test_a_process_forked_by_user_code_is_no_rank(
    error: BaseException, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = os.getpid()

    def forks() -> int:
        if (process := os.fork()) == 0:
            raise error
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    try:
        ended_with = call_user_code("Module.training_step", forks)
    finally:
        if os.getpid() != rank:
            os._exit(99)
    assert ended_with == code
    assert capfd.readouterr().err.strip().rpartition("\n")[2] == said
