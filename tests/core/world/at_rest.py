"""What must hold once everything has settled: no process holds anything for any request."""

from actorserve.core.cluster.state import ClusterState
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.state import InstanceState
from tests.core.world.parts import Process


def check_at_rest(process: Process) -> None:
    """Raises: AssertionError if the process still holds something."""
    match process.core:
        case InstanceState() as instance:
            _check_worker(instance)
            assert process.engine is not None
            assert process.engine.num_requests == 0, "the engine still holds a request"
        case GatewayState() as sessions:
            assert not sessions.sessions
            assert sessions.next_deadline() is None
        case ClusterState() as cluster:
            assert not cluster.waiting
            assert not cluster.fleet.reserving_ids
            assert not any(view.in_flight or view.num_blocks_in_flight for view in cluster.fleet.views.values())


def _check_worker(instance: InstanceState) -> None:
    memory = instance.memory
    assert not instance.requests
    assert not instance.outbox
    assert not memory.waits_for_steps
    assert memory.device.num_free_blocks == memory.device.num_usable_blocks
    assert memory.host.num_free_blocks == memory.host.num_blocks
    assert not memory.is_copying
    assert not memory.is_fetching
    assert not instance.migration_source
    assert not instance.migration_destination
    assert not instance.checkpoint_source
    assert not instance.checkpoint_store
    assert not memory.num_checkpoint_blocks
