"""What users call their cards."""

import pytest

from assemble.fit import KNOWN_CARDS, CardError, parse_cards
from recipes.serve_profiles import load_profile, shipped_profiles


@pytest.mark.parametrize(
    ("text", "count", "usable"),
    [
        ("2x16GB", 2, 15816),
        ("1x96GB", 1, 97249),
        ("32gb", 1, 32123),
        ("2xRTX5070Ti", 2, 15842),
        ("2x RTX 5070 Ti", 2, 15842),
        ("NVIDIA GeForce RTX 5090", 1, 32123),
        ("4 x rtx pro 6000", 4, 97249),
        ("RTX PRO 5000 Blackwell", 1, 48404),
        ("RTX PRO 5000 Blackwell 48GB", 1, 48404),
        ("2xRTX 5060 Ti 16GB", 2, 15816),
        ("RTX PRO 5000 72GB", 1, 72828),
        ("2*23028MiB", 2, 23028),
    ],
)
def test_names_sizes_and_mebibytes(text: str, count: int, usable: int) -> None:
    cards = parse_cards(text)
    assert (cards.count, cards.card.usable_mib) == (count, usable)


@pytest.mark.parametrize("text", ["", "0x16GB", "65x16GB", "2xRTX9999", "1x17GB", "x", "2x", "1x5MiB", "-1x16GB"])
def test_others_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(CardError, match=r"Known sizes: 12GB, 16GB|is no GPU's memory"):
        parse_cards(text)


def test_every_card_that_a_serve_profile_names_is_known() -> None:
    for name in shipped_profiles():
        profile = load_profile(name)[1]
        for card in profile.cards:
            assert parse_cards(card).card.gigabytes == parse_cards(profile.gpus).card.gigabytes


def test_a_size_is_the_smallest_card_of_that_size() -> None:
    for card in KNOWN_CARDS:
        assert parse_cards(f"{card.gigabytes}GB").card.usable_mib <= card.usable_mib


def test_cuda_never_has_more_than_nvidia_smi_reports() -> None:
    for card in KNOWN_CARDS:
        assert 0.955 < card.usable_mib / card.smi_mib < 0.996
        assert card.sm == 120
