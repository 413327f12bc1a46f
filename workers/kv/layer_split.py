"""Which layers share a block: a model's layers in groups of equal size (``actorserve.core.kv.layer_groups``)."""

from dataclasses import dataclass

from actorserve.core.kv.layer_groups import ONE_GROUP, LayerGroups

_MAX_GROUPS = 16  # more would make block tables long, and blocks too small to be copied fast
_WORTHWHILE = 0.9  # groups must need less than this share of the memory of one group
_NEARLY = 1.05  # of the least memory; then fewer groups are better


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """``layers_per_group`` layers share a block. Layer l is number ``places[l]`` of group ``group_of[l]``."""

    groups: LayerGroups
    layers_per_group: int
    group_of: tuple[int, ...]
    places: tuple[int, ...]


def one_group(num_layers: int) -> LayerSplit:
    """All layers share each block."""
    return LayerSplit(ONE_GROUP, num_layers, (0,) * num_layers, tuple(range(num_layers)))


def split_layers(windows: tuple[int, ...], context_tokens: int) -> LayerSplit:
    """The split that needs least memory for a request of ``context_tokens`` tokens, the longest that is served.

    ``windows``: of each layer, in tokens; 0 for none. A window as long as the context is none, and if windows differ,
    the longest counts for all. The last group of either kind may have fewer layers than the others; its place for them
    stays empty.
    """
    has_window = [0 < window < context_tokens for window in windows]
    window = max((window for window, has in zip(windows, has_window, strict=True) if has), default=0)
    full, windowed = has_window.count(False), has_window.count(True)
    tokens_of: dict[int, int] = {}  # tokens times layers that a request needs memory for, by layers in a group
    for size in range(1, len(windows) + 1):
        if -(-full // size) + -(-windowed // size) <= _MAX_GROUPS:
            tokens_of[size] = size * (-(-full // size) * context_tokens + -(-windowed // size) * window)
    if not windowed or min(tokens_of.values()) > _WORTHWHILE * len(windows) * context_tokens:
        return one_group(len(windows))
    size = max(size for size, tokens in tokens_of.items() if tokens <= _NEARLY * min(tokens_of.values()))
    groups = LayerGroups(-(-full // size), -(-windowed // size), window)
    group_of, places, counts = [], [], {False: 0, True: 0}
    for has in has_window:
        group, place = divmod(counts[has], size)
        counts[has] += 1
        group_of.append(group + groups.num_full if has else group)
        places.append(place)
    return LayerSplit(groups, size, tuple(group_of), tuple(places))
