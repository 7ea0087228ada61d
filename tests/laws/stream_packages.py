"""Streams of other libraries over 60 numbered samples, one row each; what their states promise differs widely.

litdata and streaming stand in no constraints: they ask for other versions than the rest, or for much beside. Their rows
are run where they are installed.
"""

import random
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

SAMPLES = 60


def numbers(first: int = 0, end: int = SAMPLES) -> Any:
    """Return a stream of Hugging Face's datasets, in six shards."""
    import datasets

    return datasets.Dataset.from_dict({"x": list(range(first, end))}).to_iterable_dataset(num_shards=6)


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"y": 2 * row["x"]}


def is_kept(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 4)


def interleaved() -> Any:
    import datasets

    halves = [numbers(0, 30), numbers(30, 60)]
    strategy = "all_exhausted_without_replacement"
    return datasets.interleave_datasets(halves, probabilities=[0.6, 0.4], seed=3, stopping_strategy=strategy)


def tars(folder: Path) -> list[str]:
    """Write six tar files of ten samples each, unless they are there; return their paths."""
    paths = [folder / f"{shard}.tar" for shard in range(6)]
    for shard, path in enumerate(paths):
        if not path.exists():
            with tarfile.open(path, "w") as tar:
                for number in range(10 * shard, 10 * shard + 10):
                    text = str(number).encode()
                    info = tarfile.TarInfo(f"{number:03d}.txt")
                    info.size = len(text)
                    tar.addfile(info, BytesIO(text))
    return [str(path) for path in paths]


def numbered(sample: dict[str, Any]) -> dict[str, int]:
    return {"x": int(sample["txt"])}


def webdataset(folder: Path, *, buffer: int = 0) -> Any:
    import webdataset as wds

    stream = wds.WebDataset(tars(folder), shardshuffle=False, workersplitter=wds.split_by_worker)
    if buffer:
        stream = stream.shuffle(buffer, rng=random.Random(5))
    return stream.map(numbered)


def litdata(folder: Path, *, shuffle: bool = False) -> Any:
    """Return a stream of litdata, in six chunks."""
    import litdata as lit
    from litdata.streaming.writer import BinaryWriter

    if not (chunks := folder / "litdata").exists():
        chunks.mkdir()
        writer = BinaryWriter(str(chunks), chunk_size=10)
        for number in range(SAMPLES):
            writer.add_item(number, {"x": number})
        writer.done()
        writer.merge()
    return lit.StreamingDataset(str(chunks), shuffle=shuffle)


def mosaic(folder: Path, *, shuffle: bool = False) -> Any:
    """Return a stream of MosaicML's streaming, in shards of some ten samples."""
    import streaming

    if not (shards := folder / "mds").exists():
        with streaming.MDSWriter(out=str(shards), columns={"x": "int"}, size_limit=200) as writer:
            for number in range(SAMPLES):
                writer.write({"x": number})

    class Repeatable(streaming.StreamingDataset):
        """Is told the epoch: by itself it counts its passes, in memory that its copies share."""

        def set_epoch(self, epoch: int) -> None:
            self.next_epoch = epoch

    return Repeatable(local=str(shards), batch_size=4, shuffle=shuffle)


#: name -> makes the stream in a folder
PACKAGES: dict[str, Callable[[Path], Any]] = {
    "datasets": lambda _: numbers(),
    "datasets, map": lambda _: numbers().map(doubled),
    "datasets, filter": lambda _: numbers().filter(is_kept),
    "datasets, shuffle": lambda _: numbers().shuffle(seed=5, buffer_size=15).map(doubled),
    "datasets, interleave": lambda _: interleaved(),
    "datasets, torch": lambda _: numbers().with_format("torch"),
    "webdataset": lambda folder: webdataset(folder),
    "webdataset, shuffle": lambda folder: webdataset(folder, buffer=15),
}
#: the same for libraries that need not be installed: library -> name -> ...
OPTIONAL: dict[str, dict[str, Callable[[Path], Any]]] = {
    "litdata": {"litdata": litdata, "litdata, shuffle": lambda folder: litdata(folder, shuffle=True)},
    "streaming": {"streaming": mosaic, "streaming, shuffle": lambda folder: mosaic(folder, shuffle=True)},
}
