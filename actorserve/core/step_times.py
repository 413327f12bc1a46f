"""What iterations take on this engine now: its profile, corrected by what is measured while it runs."""

from actorserve.core.profile import Profile


class StepTimes:
    """The profile's times for one instance. Scheduler, swap planner and policy ask the same one."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    @property
    def min_iteration_s(self) -> float:
        return self.profile.min_iteration_s

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        """An iteration that prefills so many tokens of one request, and nothing else."""
        return self.profile.prefill_s(num_tokens, num_context_tokens)

    def decode_s(self, num_requests: int, num_context_tokens: int) -> float:
        """An iteration that decodes so many requests, which attend to so many tokens in all."""
        return self.profile.decode_s(num_requests, num_context_tokens)

    def swap_s(self, num_bytes: int) -> float:
        """Copying so many bytes to the host, or back."""
        return self.profile.swap.copy_s(num_bytes)
