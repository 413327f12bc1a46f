"""Migration pairing in a cluster with pools: what moves from prompt instances, and how much of it."""

from actorserve.core.messages import InstanceRole
from tests.core.harness.pairs import A, B, Cluster

MIXED, PROMPT, TOKEN = InstanceRole.MIXED, InstanceRole.PROMPT, InstanceRole.TOKEN


def test_a_prompt_instance_promises_only_the_kv_of_what_decodes_there() -> None:
    """Its prompts stay, so one small decode among large prompts makes no token instance look full."""
    cluster = Cluster(A, B)
    cluster.report(A, 600, 6, role=PROMPT, num_decoding=1, kv_decoding_bytes=50)
    cluster.report(B, 0, 0, role=TOKEN)
    assert cluster.orders() == [("worker-0", "worker-1", 50)]
    assert cluster.view(B).promised_bytes == 50


def test_an_instance_that_empties_promises_a_token_instance_no_prompts() -> None:
    """A token instance takes requests past their first token, and a mixed one takes all."""
    for role, num_bytes in ((TOKEN, 250), (MIXED, 700)):
        cluster = Cluster(A, B)
        fields = {"num_waiting": 2, "kv_wanted_bytes": 100, "num_decoding": 3, "kv_decoding_bytes": 250}
        cluster.report(A, 600, 5, role=MIXED, draining=True, **fields)
        cluster.report(B, 0, 0, role=role)
        assert cluster.orders() == [("worker-0", "worker-1", num_bytes)]
