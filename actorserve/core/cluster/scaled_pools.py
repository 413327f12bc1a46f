"""The instances of a cluster that scales, by what they compute, and how pressed their pools are."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from actorserve.core.messages import InstanceRole
from actorserve.core.placement.instance_view import InstanceView


class PoolInstances:
    """The instances that may get requests, by role."""

    def __init__(self, present: Sequence[InstanceView]) -> None:
        self.prompts = [view for view in present if view.role is InstanceRole.PROMPT]
        self.tokens = [view for view in present if view.role is InstanceRole.TOKEN]
        self.decoding = [view for view in present if view.role is not InstanceRole.PROMPT]
        mixed = [view for view in present if view.role is InstanceRole.MIXED]
        self.has_pools = bool(self.prompts or self.tokens)
        # The roles with which a new instance helps prompts and tokens. A pool without an instance gets one,
        # unless mixed instances do its work.
        self.prompt_role = InstanceRole.PROMPT if self.prompts or not mixed else InstanceRole.MIXED
        self.token_role = InstanceRole.TOKEN if self.tokens or not mixed else InstanceRole.MIXED
        # Those that may end: never the last one that computes its phase.
        self.ending_prompts = self.prompts if len(self.prompts) > 1 else []
        self.ending_decoding = self.tokens if len(self.tokens) > 1 else []
        if len(mixed) > 1 or (self.prompts and self.tokens):
            self.ending_decoding = self.ending_decoding + mixed


class Pressures(NamedTuple):
    """How pressed the pools are, by the numbers of their instances."""

    prompts: float
    tokens: float
    num_prompts: int
    num_tokens: int

    @property
    def is_more_on_prompts(self) -> bool:
        """Whether the prompt pool is more pressed; of equally pressed pools the smaller one."""
        return (self.prompts, -self.num_prompts) > (self.tokens, -self.num_tokens)


def spread(num_needed: float, num_instances: int) -> float:
    """How pressed so many instances are by what ``num_needed`` of them would just bear."""
    return num_needed / num_instances if num_instances else inf
