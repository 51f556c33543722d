"""Detecting directories that Hugging Face `datasets` saved."""

import os

from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths

STATE_NAME, INFO_NAME, DICT_NAME = "state.json", "dataset_info.json", "dataset_dict.json"


def is_saved_to_disk(where: Paths) -> bool:
    """Whether this is a directory that `save_to_disk` wrote."""
    if not isinstance(where, (str, os.PathLike)):
        return False
    has_state = all(os.path.isfile(os.path.join(where, name)) for name in (STATE_NAME, INFO_NAME))
    return has_state or os.path.isfile(os.path.join(where, DICT_NAME))


FORMAT = Format(
    "huggingface",
    "a folder of Hugging Face datasets (save_to_disk)",
    is_saved_to_disk,
    "rankfeed.sources.hf.source:HuggingFaceSource",
)
