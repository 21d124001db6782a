"""YAML, read by libyaml where PyYAML came with it: that takes a tenth of the time."""

from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str) -> Any:
    """The content of one document.

    Raises:
        yaml.YAMLError: broken, more than one document, or a tag that is no plain data.
    """
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - both load plain data only


def parse_yaml_documents(text: str) -> list[Any]:
    """The content of each document.

    Raises:
        yaml.YAMLError: broken, or a tag that is no plain data.
    """
    return list(yaml.load_all(text, Loader=_LOADER))
