"""What a module has come to consist of, beside what another attempt can build."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from midstride.engine.errors import UserError
from midstride.engine.modules.structure import ModuleStructure


def test_a_layer_that_cannot_be_rebuilt_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cpu")
    trained, again = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    structure, resumed = ModuleStructure(trained, device), ModuleStructure(again, device)
    trained.append(nn.TransformerEncoderLayer(2, 1, 2, activation=F.gelu))  # compiled, and no function of Python's

    state = structure.state_dict()

    assert "1 came up in training and holds what no snapshot can (structure/1/activation)" in caplog.text
    with pytest.raises(UserError, match=r"the module 1 came up .*: 1\.activation \(was .*gelu.* in __init__, setup"):
        resumed.load_state_dict(state)
