"""Detecting directories that Hugging Face `datasets` saved."""

import os

STATE_NAME, INFO_NAME, DICT_NAME = "state.json", "dataset_info.json", "dataset_dict.json"


def is_saved_to_disk(paths: list[str]) -> bool:
    """Whether this is a directory that `save_to_disk` wrote."""
    has_state = all(os.path.isfile(os.path.join(paths[0], name)) for name in (STATE_NAME, INFO_NAME))
    return has_state or os.path.isfile(os.path.join(paths[0], DICT_NAME))
