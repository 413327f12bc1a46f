"""Splitwise's dispatch: join the shortest queue, measured in pending tokens.

It keeps the time to the first token short, because a prompt waits for the prompts before it. Memory says little about
them: the same memory may belong to requests that decode, or to prompts that are still to be computed. Splitwise's
simulator counts a prompt as a whole until it is computed; here only what is left of it counts.
"""

from actorserve.core.placement.instance_view import InstanceView


class ShortestQueue:
    """The instance whose requests must feed the fewest tokens until each of them has its next token.

    That is what is left of the prompts, including placements in flight, and one token for each request. So of two
    instances without prompts, the one with fewer requests gets the next prompt. The part of the prompt that an
    instance's prefix cache holds counts as computed.
    """

    counts_prefixes = True
    prefers_room = False  # the queue may be shortest where memory is full

    def score(self, view: InstanceView, num_saved_tokens: int = 0) -> float:
        report = view.report
        num_requests = view.num_running + report.num_waiting
        return float(num_saved_tokens - view.pending_tokens - num_requests)
