"""Which layers share a block."""

import pytest

from actorserve.core.kv.layer_groups import ONE_GROUP, LayerGroups
from workers.kv.layer_split import one_group, split_layers


def gemma3(num_layers: int, window: int) -> tuple[int, ...]:
    """Gemma 3's windows: every sixth layer attends to everything."""
    return tuple(0 if number % 6 == 5 else window for number in range(num_layers))


@pytest.mark.parametrize(
    ("windows", "context", "groups", "layers_per_group"),
    [
        (gemma3(26, 512), 32768, LayerGroups(1, 6, 512), 4),
        (gemma3(34, 1024), 131072, LayerGroups(1, 6, 1024), 5),
        (gemma3(48, 1024), 131072, LayerGroups(1, 5, 1024), 8),
        (gemma3(62, 1024), 131072, LayerGroups(1, 6, 1024), 10),
        ((128, 0) * 12, 131072, LayerGroups(1, 1, 128), 12),
        ((4096,) * 32, 32768, LayerGroups(0, 1, 4096), 32),
        ((0,) * 28 + (4096,) * 8, 32768, LayerGroups(2, 1, 4096), 14),
    ],
)
def test_groups_follow_the_windows(
    windows: tuple[int, ...], context: int, groups: LayerGroups, layers_per_group: int
) -> None:
    """Groups are as large as they can be without much memory for empty places."""
    split = split_layers(windows, context)
    assert split.groups == groups
    assert split.layers_per_group == layers_per_group


@pytest.mark.parametrize("windows", [gemma3(26, 512), (0, 7, 0, 0, 9, 7), (8,) * 5, (0,) * 4])
def test_each_layer_has_a_place(windows: tuple[int, ...]) -> None:
    """No two layers have the same place, and those with a window are in windowed groups."""
    split = split_layers(windows, 4096)
    places = list(zip(split.group_of, split.places, strict=True))
    assert len(set(places)) == len(windows)
    for (group, place), window in zip(places, windows, strict=True):
        assert (group >= split.groups.num_full) == (window > 0)
        assert 0 <= place < split.layers_per_group


@pytest.mark.parametrize(("windows", "context"), [((0,) * 4, 100), ((512,) * 4, 512), ((0, 500, 0, 0), 512)])
def test_windows_that_save_little_are_no_windows(windows: tuple[int, ...], context: int) -> None:
    """Without windows, or if they save little memory in the longest context, all layers share each block."""
    split = split_layers(windows, context)
    assert split == one_group(4)
    assert split.groups == ONE_GROUP


def test_windows_that_differ_count_as_the_longest() -> None:
    """One window counts for all layers that have one."""
    assert split_layers((0, 7, 0, 9), 4096).groups == LayerGroups(1, 1, 9)
