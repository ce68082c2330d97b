"""Hugging Face datasets by name.

The library is optional (``pip install -e '.[hub]'``). It downloads the data or finds it in its
cache.
"""

import re
from functools import cached_property
from typing import Any

from huggingface_hub import constants

from espalier.data.files.compression import import_library
from espalier.data.files.tables import DatasetRows
from espalier.errors import InputError, first_line

TRAINING_SPLIT = ("data.hub-split", "set it to one of these, or to several joined by +")
"""Key and remedy for a dataset without the split that clients train on."""

CANNOT_BE_LOADED = "cannot be loaded"
"""Text in the error for a dataset that does not exist or cannot be reached."""

TEST_SPLIT = (
    "task.test-path = ''",
    "the task's test items are in that split; name a JSON Lines file of public test items",
)
"""Key and remedy for a dataset without the split of a task's public test items."""


class HubRows(DatasetRows):
    """Rows of a split of a Hugging Face dataset.

    Parameters
    ----------
    name : dataset on the hub, or a local folder with a dataset
    called : description of the dataset, for errors
    missing : key and remedy for the error if the dataset has no such split
    """

    def __init__(
        self,
        name: str,
        config: str,
        split: str,
        called: str,
        missing: tuple[str, str] = TRAINING_SPLIT,
    ) -> None:
        super().__init__(f"the dataset '{name}' ({split})", "data.path")
        self._name = name
        self._config = config
        self._split = split
        self._called = called
        self._missing = missing

    def dataset(self) -> Any:
        return self._dataset

    @cached_property
    def _dataset(self) -> Any:
        """The dataset. Raises InputError if it, or the library, or the split is missing."""
        datasets = import_library("datasets")
        try:
            return datasets.load_dataset(self._name, self._config or None, split=self._split)
        except Exception as error:
            if lacks := re.match(r'Unknown split "(.*?)"\. Should be one of \[(.*)\]', str(error)):
                key, remedy = self._missing
                raise InputError(
                    f"{key}: the dataset {self._name!r} has no split {lacks[1]!r}, only {lacks[2]};"
                    f" {remedy}"
                ) from None
            remedy = "wait until the hub can be reached"
            if constants.HF_HUB_OFFLINE:
                remedy = "unset HF_HUB_OFFLINE, with which nothing is downloaded"
            raise InputError(
                f"{self._called} {CANNOT_BE_LOADED}: {type(error).__name__}: {first_line(error)};"
                f" correct the name and data.hub-config, or {remedy}"
            ) from error

    def shown(self) -> str:
        return self.path

    def identity(self) -> str:
        return f"{self._name} {self._config} {self._split}"

    def state(self) -> list[int]:
        """Return the size of the data, and the fingerprint by which the library tells versions."""
        fingerprint = int.from_bytes(self._dataset._fingerprint.encode(), "big")
        return [self._dataset.data.nbytes, fingerprint, 0, 0]
