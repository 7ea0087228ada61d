"""Whole modules of libraries that are built on Lightning, as those libraries make them."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from chemprop import data as molecules
from chemprop import models as chemprop
from chemprop import nn as parts
from darts import TimeSeries
from darts.models import NBEATSModel
from libraries.rows import Row, draws
from neuralforecast.models import NHITS
from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset
from pytorch_forecasting import TemporalFusionTransformer
from pytorch_forecasting import TimeSeriesDataSet as Windows
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader
from torchmdnet.module import LNNP

SMILES = ["CCO", "CCN", "CCC", "CCCl", "c1ccccc1", "CC(=O)O", "CCBr", "COC", "CNC", "CC=O", "C1CCCCC1", "CCS"]


def property_model() -> Any:
    """Return chemprop's, with its schedule and metrics."""
    return chemprop.MPNN(
        parts.BondMessagePassing(d_h=16, depth=2),
        parts.MeanAggregation(),
        parts.RegressionFFN(input_dim=16, hidden_dim=16),
        batch_norm=True,
        metrics=[parts.metrics.RMSE(), parts.metrics.MAE()],
        warmup_epochs=1,
    )


def compounds() -> dict[str, Any]:
    points = [molecules.MoleculeDatapoint.from_smi(one, np.array([float(len(one))])) for one in SMILES]
    train, val = molecules.MoleculeDataset(points[:8]), molecules.MoleculeDataset(points[8:])
    train.normalize_targets()
    return {
        "train": molecules.build_dataloader(train, batch_size=3, num_workers=0, seed=0),
        "val": molecules.build_dataloader(val, batch_size=4, num_workers=0, shuffle=False),
    }


def series() -> pd.DataFrame:
    """Return three series of 20 numbers each."""
    numbers = draws(3, 20).cumsum(dim=1).flatten().numpy()
    names = np.repeat(["a", "b", "c"], 20)
    return pd.DataFrame({"unique_id": names, "ds": np.tile(np.arange(20), 3), "y": numbers})


def windows() -> Any:
    return Windows(
        series(),
        time_idx="ds",
        target="y",
        group_ids=["unique_id"],
        max_encoder_length=6,
        max_prediction_length=2,
        static_categoricals=["unique_id"],
        time_varying_known_reals=["ds"],
        time_varying_unknown_reals=["y"],
    )


def transformer() -> Any:
    return TemporalFusionTransformer.from_dataset(
        windows(), hidden_size=4, attention_head_size=1, hidden_continuous_size=2, dropout=0.1, learning_rate=0.03
    )


def window_loaders() -> dict[str, Any]:
    found = windows()
    return {
        "train": found.to_dataloader(train=True, batch_size=13, num_workers=0),
        "val": found.to_dataloader(train=False, batch_size=8, num_workers=0),
    }


def darts() -> dict[str, Any]:
    """Return the module and the data that darts' `fit` passes to a Trainer."""
    shape = {"num_stacks": 1, "num_blocks": 1, "num_layers": 2, "layer_widths": 16}
    model = NBEATSModel(6, 2, **shape, dropout=0.1, batch_size=4, random_state=1, optimizer_kwargs={"lr": 0.01})
    numbers = TimeSeries.from_values(draws(30).cumsum(dim=0).numpy())
    _, given = model._setup_for_fit_from_dataset(series=numbers, val_series=numbers)
    found: dict[str, Any] = model._setup_for_train(**given)
    return found


def interpolating() -> Any:
    return NHITS(2, 6, mlp_units=[[16, 16]] * 3, max_steps=6, batch_size=1, windows_batch_size=8, scaler_type="robust")


def forecasts() -> dict[str, Any]:
    dataset, *_ = TimeSeriesDataset.from_df(series())
    return {"data": TimeSeriesDataModule(dataset, batch_size=1, valid_batch_size=3)}


def potential() -> Any:
    """Return torchmd-net's module for energies and forces, with smoothed losses."""
    net = {"model": "tensornet", "embedding_dimension": 8, "num_layers": 1, "num_rbf": 4, "rbf_type": "expnorm"}
    net |= {"trainable_rbf": False, "activation": "silu", "cutoff_lower": 0.0, "cutoff_upper": 4.5, "max_z": 10}
    net |= {"max_num_neighbors": 8, "precision": 32, "equivariance_invariance_group": "O(3)", "atom_filter": -1}
    net |= {"derivative": True, "prior_model": None, "output_model": "Scalar", "reduce_op": "add"}
    fit = {"lr": 0.01, "weight_decay": 0.01, "lr_factor": 0.5, "lr_patience": 0, "lr_min": 1e-6, "lr_warmup_steps": 3}
    fit |= {"y_weight": 1.0, "neg_dy_weight": 2.0, "ema_alpha_y": 0.9, "ema_alpha_neg_dy": 0.9}
    return LNNP({**net, **fit, "load_model": None, "remove_ref_energy": False})


def conformers() -> dict[str, Any]:
    """Return loaders of 9 and 3 molecules of five atoms, with their energies and forces."""
    atoms, places, forces = torch.tensor([6, 1, 1, 1, 1]), draws(12, 5, 3), draws(12, 5, 3, seed=1)
    found = [
        Data(z=atoms, pos=place, y=place.sum().view(1, 1), neg_dy=force)
        for place, force in zip(places, forces, strict=True)
    ]
    return {"train": GraphLoader(found[:9], batch_size=3), "val": GraphLoader(found[9:], batch_size=3)}


ROWS = {
    "chemprop": Row(property_model, compounds),
    "pytorch-forecasting": Row(transformer, window_loaders, {"gradient_clip_val": 0.1}, draws=True),
    "torchmd-net": Row(potential, conformers),
    "darts": Row(lambda: darts()["model"], lambda: {"data": darts()["datamodule"]}, draws=True),
    "neuralforecast": Row(interpolating, forecasts, draws=True),
}
