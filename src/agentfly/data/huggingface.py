"""Datasets of the Hugging Face library `datasets`: of the hub, or a folder that `save_to_disk` wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentfly.data.files import SUFFIXES, LocatedRow, convert_arrow_row
from agentfly.errors import DataError, describe, require_extra

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def is_dataset(source: str | Path) -> bool:
    """Whether `source` is a `save_to_disk` folder, or the name of a dataset of the hub: `org/name`, `org/name:config`.

    A name is a path, too: where the folder `org` exists here, it is read as a path.
    """
    path = Path(source)
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return True
    is_name = _HUB_NAME.fullmatch(str(source)) is not None
    return is_name and not path.parent.exists() and path.suffix.lower() not in SUFFIXES


def read_dataset(source: str | Path, split: str | None, *, stream: bool) -> Iterator[LocatedRow]:
    """Yield the rows of a dataset with their places. `stream`: read rows of the hub one by one, without a download.

    Raises DataError where the dataset cannot be loaded, or has several splits and `split` names none.
    """
    is_local = Path(source).is_dir()
    kind = "a saved dataset" if is_local else "no file or folder, and is read as a dataset of the hub"
    with require_extra(f"{source} is {kind}, which", "datasets"):
        import datasets
    try:
        if is_local:
            dataset = datasets.load_from_disk(str(source))
        else:
            name, _, config = str(source).partition(":")
            dataset = datasets.load_dataset(name, config or None, split=split, streaming=stream)
    except Exception as error:  # the library raises its own errors, those of its HTTP client and built-in ones
        problem = f"the dataset in {source} cannot be loaded"
        if not is_local:
            problem = f"there is no file or folder {source}, and no dataset of that name can be loaded from the hub"
        raise DataError(f"{problem}: {describe(error)}") from error
    if isinstance(dataset, dict):
        splits = ", ".join(dataset)
        if split is None and len(dataset) > 1:
            raise DataError(f"the dataset {source} has the splits {splits}; choose one with split=")
        name = split or next(iter(dataset))
        if name not in dataset:
            raise DataError(f"the dataset {source} has no split {name!r}; it has {splits}")
        dataset = dataset[name]
    elif split is not None and is_local:
        raise DataError(f"the dataset in {source} is one split: leave split={split!r} out")
    return iterate_dataset(dataset)


def iterate_dataset(dataset: Any) -> Iterator[LocatedRow]:
    """Yield the rows of a `Dataset` or an `IterableDataset`, one by one. Images are left as they are stored."""
    from datasets import Image, List

    for name, feature in (dataset.features or {}).items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    for number, columns in enumerate(dataset):
        yield f"row {number}", convert_arrow_row(columns)
