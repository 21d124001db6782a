"""YAML, read by libyaml where PyYAML came with it: that takes a tenth of the time. A key that is there twice is refused."""

from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    _Base = yaml.SafeLoader
else:
    _Base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    """PyYAML itself takes the last of two equal keys, without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> list[Any]:
    """The content of each document.

    Raises:
        yaml.YAMLError: broken, a key twice, or a tag that is no plain data.
    """
    return list(yaml.load_all(text, Loader=_Loader))


def read_yaml(path: Path, kind: str, refusal: type[Exception]) -> tuple[str, list[Any]]:
    """A file's text, and the content of each of its documents.

    Args:
        path: The file.
        kind: What it is, for a message.
        refusal: What to raise.

    Raises:
        refusal: it cannot be read, or is not YAML as `parse_yaml` takes it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return text, parse_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(f"{kind} {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise refusal(f"{kind} {path} is not valid YAML: {' '.join(str(error).split())}") from error


def read_mapping(path: Path, kind: str, refusal: type[Exception]) -> tuple[str, dict[str, Any]]:
    """A file's text, and the one mapping that it holds.

    Raises:
        refusal: as `read_yaml`; or it holds something else.
    """
    text, documents = read_yaml(path, kind, refusal)
    if len(documents) > 1:
        raise refusal(f"{kind} {path} holds {len(documents)} documents; one is expected")
    data = documents[0] if documents else None
    if not isinstance(data, dict):
        raise refusal(f"{kind} {path} must be a mapping of keys to values, found {type(data).__name__}")
    return text, data
