"""The quick way of reading a header against the careful one: it may pass on anything, and must never see anything else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assemble.checkpoint import CheckpointError
from assemble.header import DTYPE_BYTES, _at_once, _one_by_one, read_header
from assemble.jsonfile import JSONFileError

WIDTHS = {name: width for name, width in DTYPE_BYTES.items() if name != "BOOL"}
NAMES = st.text('abc.0_é:\\"', min_size=1, max_size=6)
METADATA = st.none() | st.dictionaries(st.text("ab:", max_size=3), st.text('xy:"', max_size=3), max_size=2)
TENSOR = st.tuples(NAMES, st.sampled_from(sorted(WIDTHS)), st.lists(st.integers(0, 4), max_size=3))


def entry(dtype: str, shape: list[int], begin: int) -> dict[str, Any]:
    count = WIDTHS[dtype]
    for size in shape:
        count *= size
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + count]}


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    end, found = 0, dict[str, Any]()
    if (metadata := draw(METADATA)) is not None:
        found["__metadata__"] = metadata
    for name, dtype, shape in draw(st.lists(TENSOR, max_size=4, unique_by=lambda t: t[0])):
        found[name] = entry(dtype, shape, end)
        end = found[name]["data_offsets"][1]
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    return json.dumps(found, separators=separators, ensure_ascii=draw(st.booleans())).encode() + b" " * draw(st.integers(0, 7))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A header with a few bytes cut out, put in, or copied from elsewhere in it."""
    text = draw(headers())
    for _ in range(draw(st.integers(1, 3))):
        first, last = sorted(draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
        put = draw(
            st.sampled_from([b"", text[first:last], text[first:last] * 2, b'"', b",", b":", b"-1", b"1.0", b"null", b"\\"])
        )
        text = text[:first] + put + text[draw(st.sampled_from([first, last])) :]
    return text


def careful(text: bytes) -> Any:
    try:
        return _one_by_one(text, "a.safetensors", 100)
    except (CheckpointError, JSONFileError):
        return None


@given(headers())
def test_sound_headers_are_read_alike(text: bytes) -> None:
    expected = careful(text)
    assert expected is not None
    assert read_header(text, "a.safetensors", 100) == expected
    assert _at_once(text, "a.safetensors", 100) in (None, expected)


@given(damaged())
def test_what_is_damaged_is_never_taken_for_something_else(text: bytes) -> None:
    found = _at_once(text, "a.safetensors", 100)
    assert found is None or found == careful(text)


def test_the_headers_that_there_are_go_the_quick_way() -> None:
    text = json.dumps(
        {"__metadata__": {"format": "pt"}} | {f"model.layers.{i}.weight": entry("BF16", [2, 3], 12 * i) for i in range(9)}
    )
    for spelt in (text, text.replace(": ", ":").replace(", ", ",")):
        found = _at_once(spelt.encode(), "a.safetensors", 100)
        assert found == careful(spelt.encode())
        assert found is not None
        assert len(found[0]) == 9


FIRST = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
SECOND = '{"dtype":"U8","shape":[1],"data_offsets":[1,2]}'
BARE = '"dtype":"U8","shape":[1],"data_offsets":[0,1]'
OFFSETS = '"data_offsets":[0,1]}}'


@pytest.mark.parametrize(
    "text",
    [
        f'{{"a":{FIRST},"a":{FIRST}}}',  # a tensor twice
        f'{{"a":{FIRST},"a" :{SECOND}}}',
        f'{{"a":{{"dtype":"F32",{BARE}}}}}',  # a field twice
        f'{{"a":{{"dtype":"U8",{BARE}}},"b":{{"shape":[1],"data_offsets":[1,2]}}}}',  # one has it twice, the other not at all
        f'{{"a":{FIRST},"\\u0061":{FIRST}}}',
        f'{{"__metadata__":{{"x":"1","x":"2"}},"a":{FIRST}}}',
        f'{{"__metadata__":{{"x":"1"}},"__metadata__":{{}},"a":{FIRST}}}',
        '{"a":{"dtype":"U8","shape":[1.0],' + OFFSETS,
        '{"a":{"dtype":"U8","shape":[true],' + OFFSETS,
        '{"a":{"dtype":"U8","shape":null,' + OFFSETS,
        '{"a":{"dtype":"U8","shape":[' + ",".join(["1"] * 17) + "]," + OFFSETS,
        '{"a":{"dtype":"U8","shape":[-1],"data_offsets":[1,0]}}',
        '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,9223372036854775808]}}',
        '{"a":{"dtype":"","shape":[0],"data_offsets":[0,0]}}',
    ],
)
def test_what_only_the_careful_way_may_judge(text: str) -> None:
    assert _at_once(text.encode(), "a.safetensors", 100) is None
    with pytest.raises((CheckpointError, JSONFileError)):
        read_header(text.encode(), "a.safetensors", 100)
