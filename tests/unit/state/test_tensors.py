"""Tensors in the codec: dtypes, strides, shared memory."""

import numpy as np
import pytest
import torch
from support.codec_round_trip import through_files
from torch import Tensor, nn

from midstride.engine.state.codec import decode, encode
from midstride.engine.state.differences import differences


def _tensors() -> dict[str, Tensor]:
    base = torch.arange(24.0).reshape(2, 3, 4)
    return {
        "plain": base.clone(),
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
        "empty inside": torch.empty(3, 0, 2).transpose(0, 2),
        "transposed": base.clone().transpose(0, 2),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "channels_last of one": torch.randn(1, 1, 4, 5).to(memory_format=torch.channels_last),
        "odd strides of one": torch.randn(3).as_strided((1, 3), (7, 1)),
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "expanded scalar": torch.tensor(3.0).expand(4, 4),
        "column": torch.arange(12.0).reshape(3, 4)[:, 1],
        "stepped": torch.arange(12)[::3],
        "windows": torch.arange(6.0).unfold(0, 3, 1),
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.randn(5).bfloat16(),
        "half": torch.tensor([float("nan"), float("-inf"), -0.0]).half(),
        "float8": torch.randn(6).to(torch.float8_e4m3fn),
        "double": torch.randn(5, dtype=torch.float64),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "int8": torch.arange(3, dtype=torch.int8),
        "complex64": torch.randn(2, 2, dtype=torch.complex64),
        "complex128": torch.randn(2, 2, dtype=torch.complex128).t(),
        "complex expanded": torch.randn(2, 1, dtype=torch.complex128).expand(2, 3),
        "scalar complex128": torch.tensor(1 + 2j, dtype=torch.complex128),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "nan bits": torch.tensor([0x7FC00001, -1, 0x7F800001], dtype=torch.int32).view(torch.float32),
        "permuted int": torch.arange(24).reshape(2, 3, 4).permute(1, 2, 0),
    }


@pytest.mark.parametrize("name", list(_tensors()))
def test_a_tensor_keeps_bits_dtype_shape_and_strides(name: str):
    tensor = _tensors()[name]
    back = through_files({"it": tensor})["it"]
    assert differences(tensor, back) == []
    assert type(back) is Tensor
    if name not in ("conjugate", "negative"):  # those are written as the values they stand for
        assert back.stride() == tensor.stride()


def test_names_are_readable_and_unique():
    tree = {
        "module": {"conv1.weight": torch.zeros(2)},
        "optimizers": [{"state": {3: {"exp_avg": torch.ones(2)}}}],
        "a": {"b": torch.zeros(1)},
        "a/b": torch.ones(1),
        "__metadata__": torch.ones(3),
        "bad \udce9": torch.ones(4),
        "keys": {1: torch.ones(5), "1": torch.ones(6)},
    }
    encoded = encode(tree)
    assert list(encoded.tensors)[:4] == ["module/conv1.weight", "optimizers/0/state/3/exp_avg", "a/b", "a/b~2"]
    assert len(encoded.tensors) == 8
    assert differences(tree, through_files(tree)) == []


def test_the_copy_is_the_staging():
    tree = {"weight": torch.zeros(3), "column": torch.zeros(2, 2)[:, 0], "array": np.zeros(3), "list": [1]}
    encoded = encode(tree)
    tree["weight"].fill_(1)
    tree["column"].fill_(1)
    tree["array"][:] = 1
    tree["list"].append(2)
    back = decode(encoded.document, encoded.tensors)
    assert back["weight"].sum() == 0
    assert back["column"].sum() == 0
    assert back["array"].sum() == 0
    assert back["list"] == [1]
    back["weight"].fill_(2)
    assert encoded.tensors["weight"].sum() == 0


def test_views_of_one_buffer_keep_sharing_it():
    buffer = torch.arange(12.0)
    tree = {
        "front": buffer[:8],
        "back": buffer[4:].view(2, 4),
        "rows": buffer.view(3, 4)[:, 1],
        "bits": buffer.view(torch.int32)[2:5],
        "apart": torch.zeros(3),
    }
    encoded = encode(tree)
    assert sorted(encoded.tensors) == ["apart", "front"]
    back = through_files(tree)
    assert differences(tree, back) == []
    back["front"][5] = 100.0
    assert back["back"][0, 1] == 100.0
    assert back["rows"][1] == 100.0
    assert back["rows"].stride() == (4,)


def test_conjugated_and_negated_views_keep_their_values():
    numbers = torch.randn(3, dtype=torch.complex64)
    tree = {"numbers": numbers, "conjugate": numbers.conj(), "negative": numbers.conj().imag, "imag": numbers.imag}
    assert differences(tree, through_files(tree)) == []


def test_neighbours_in_one_buffer_are_plain_tensors():
    buffer = torch.arange(8.0)
    encoded = encode({"a": buffer[:4].view(2, 2), "b": buffer[4:]})
    assert {name: tensor.dtype for name, tensor in encoded.tensors.items()} == {"a": torch.float32, "b": torch.float32}


def test_a_view_of_a_large_buffer_does_not_bring_it_along():
    encoded = encode({"row": torch.zeros(1000, 1000)[3], "column": torch.zeros(3, 1000)[:, :2]})
    assert encoded.tensors["row"].numel() == 1000
    assert encoded.tensors["column"].nbytes < 3 * 1000 * 4


def test_parameters_and_gradients_flags_come_back():
    tree = {
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
    }
    back = through_files(tree)
    assert [type(value) for value in back.values()] == [nn.Parameter, nn.Parameter, Tensor]
    assert [value.requires_grad for value in back.values()] == [True, False, True]


def test_sparse_gradients_come_back():
    sparse = torch.sparse_coo_tensor([[1, 1, 4]], [[1.0, 2], [3, 4], [5, 6]], (6, 2), check_invariants=True)
    back = through_files({"raw": sparse, "coalesced": sparse.coalesce()})
    assert not back["raw"].is_coalesced()
    assert back["coalesced"].is_coalesced()
    assert differences(back, {"raw": sparse, "coalesced": sparse.coalesce()}) == []
