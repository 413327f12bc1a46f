"""The energy of requests: no joule is lost or made up, whatever runs and whenever the power is read."""

import pytest
from hypothesis import given, strategies as st

from actorserve.core.messages import NOTHING_SPENT, Energy, PowerReading, total_energy
from actorserve.core.power.accounting import EnergyAccount, EnergyRow


def counter(joules: float) -> PowerReading:
    return PowerReading("GPU-0", energy_j=joules)


def opened() -> EnergyAccount:
    """An account whose counter was read at 0 s."""
    account = EnergyAccount()
    account.read(counter(0.0), 0.0, ())
    return account


def by_phase(energy: Energy | None) -> tuple[float, float]:
    assert energy is not None
    return energy.prompt_j, energy.token_j


def run(account: EnergyAccount, begun_s: float, ended_s: float, *rows: EnergyRow) -> None:
    """An iteration from one time to the other."""
    account.begin(begun_s)
    account.end(rows, ended_s)


def test_rows_share_an_iteration_by_what_they_cost_and_idle_time_belongs_to_none() -> None:
    """100 W for 1 s, of which 0.4 s are computed: 40 J, of which a prompt that costs three times as much gets 30 J."""
    account = opened()
    run(account, 0.2, 0.6, ("a", False, 3.0), ("b", True, 1.0))
    account.read(counter(100.0), 1.0, ())
    assert by_phase(account.spent("a")) == pytest.approx((30.0, 0.0))
    assert by_phase(account.spent("b")) == pytest.approx((0.0, 10.0))
    assert (account.prompt_j, account.token_j, account.rest_j) == pytest.approx((30.0, 10.0, 60.0))


def test_the_energy_of_a_processs_cpu_time_has_no_idle_part() -> None:
    """A CPU worker's reading is what its CPU time took, all of it in iterations if there were any."""
    account = EnergyAccount()
    account.read(PowerReading(energy_j=0.0), 0.0, ())
    run(account, 0.2, 0.6, ("a", False, 1.0))
    account.read(PowerReading(energy_j=12.0), 1.0, ())
    assert by_phase(account.spent("a")) == pytest.approx((12.0, 0.0))
    account.read(PowerReading(energy_j=13.0), 2.0, ())
    assert account.rest_j == pytest.approx(1.0)


def test_a_request_has_both_phases() -> None:
    """The prompt's chunks and the tokens after it are told apart."""
    account = opened()
    run(account, 0.0, 0.5, ("a", False, 1.0))
    run(account, 0.5, 1.0, ("a", True, 7.0))
    account.read(counter(20.0), 1.0, ())
    assert by_phase(account.spent("a")) == pytest.approx((10.0, 10.0))


def test_an_iteration_that_lasts_longer_than_a_period_gets_its_energy_when_it_ends() -> None:
    """While a long prompt runs, its energy waits; it does not go to the short iteration before it, nor to idle time."""
    account = opened()
    run(account, 0.0, 0.5, ("short", True, 1.0))
    account.begin(0.5)
    for second in (1, 2, 3, 4):
        account.read(counter(10.0 * second), float(second), ())
    assert by_phase(account.spent("short")) == pytest.approx((0.0, 5.0))
    assert account.pending_j == pytest.approx(35.0)
    account.end([("long", False, 1.0)], 4.5)
    account.read(counter(50.0), 5.0, ())
    assert by_phase(account.spent("long")) == pytest.approx((40.0, 0.0))
    assert account.rest_j == pytest.approx(5.0)


def test_without_a_counter_the_mean_of_two_readings_counts() -> None:
    """A device that tells its power alone took the mean of both readings' power for the time between them."""
    account = EnergyAccount()
    account.read(PowerReading("GPU-0", draw_watts=100.0), 0.0, ())
    run(account, 0.0, 1.0, ("a", False, 1.0))
    account.read(PowerReading("GPU-0", draw_watts=300.0), 1.0, ())
    assert by_phase(account.spent("a")) == pytest.approx((200.0, 0.0))


def test_a_request_that_ends_before_the_next_reading_counts_at_the_last_known_power() -> None:
    """What that differs from the reading after it belongs to no request, so the sum is still the device's energy."""
    account = opened()
    run(account, 0.0, 1.0, ("a", False, 1.0))
    account.read(counter(100.0), 1.0, ())
    run(account, 1.0, 1.5, ("a", True, 1.0))
    assert by_phase(account.forget("a")) == pytest.approx((100.0, 50.0))
    account.read(counter(180.0), 2.0, ())  # it took 80 W, not 100 W
    assert account.prompt_j + account.token_j == pytest.approx(150.0)
    assert account.rest_j == pytest.approx(30.0)


def test_what_is_not_known_is_not_told() -> None:
    """Before the first reading, without power, and after readings have stopped, there is no number."""
    account = EnergyAccount()
    run(account, 0.0, 0.5, ("early", False, 1.0))
    assert account.spent("early") is None
    account.read(PowerReading(device="GPU-0", memory_free_bytes=1), 0.6, ("early",))
    assert not account.is_open
    account.read(counter(0.0), 1.0, ("early",))
    assert account.spent("early") is None, "a part of it was before the first reading"
    assert account.spent("new") == NOTHING_SPENT
    run(account, 1.0, 1.1, ("new", False, 1.0))
    assert account.spent("new") is None, "nothing tells yet what an iteration takes"
    account.read(counter(5.0), 2.0, ())
    assert by_phase(account.spent("new")) == pytest.approx((0.5, 0.0))
    run(account, 9.0, 9.1, ("new", True, 1.0))
    assert account.spent("new") is None, "the driver has not answered for 7 s"
    account.read(counter(40.0), 10.0, ())
    assert account.spent("new") is not None, "but its counter went on"


def test_power_without_a_counter_is_lost_while_it_is_not_read() -> None:
    """After a long silence without a counter, requests that ran meanwhile have no number, and new ones do."""
    account = EnergyAccount()
    account.read(PowerReading("GPU-0", draw_watts=100.0), 0.0, ())
    run(account, 1.0, 2.0, ("a", False, 1.0))
    account.read(PowerReading("GPU-0", draw_watts=100.0), 20.0, ("a",))
    assert account.spent("a") is None
    run(account, 20.0, 21.0, ("b", False, 1.0))
    account.read(PowerReading("GPU-0", draw_watts=100.0), 21.0, ("a", "b"))
    assert by_phase(account.spent("b")) == pytest.approx((100.0, 0.0))


_seconds = st.floats(0.001, 3.0)
_rows = st.lists(
    st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans(), st.floats(0.0, 10.0)), max_size=5
)
_events = st.one_of(
    st.tuples(st.just("run"), _seconds, _rows),
    st.tuples(st.just("idle"), _seconds, st.none()),
    st.tuples(st.just("read"), st.floats(0.0, 500.0), st.none()),
    st.tuples(st.just("read within"), st.floats(0.0, 500.0), _rows),
    st.tuples(st.just("forget"), st.sampled_from(["a", "b", "c", "d"]), st.none()),
)


@given(st.lists(_events, max_size=60))
def test_energy_is_conserved(events: list[tuple[str, float | str, list[EnergyRow] | None]]) -> None:
    """Requests' joules and the rest are the device's joules, for any iterations, readings and endings."""
    account, now, joules = opened(), 0.0, 0.0
    told: dict[str, Energy | None] = {}
    gone, all_known = NOTHING_SPENT, True
    for what, value, rows in events:
        if what == "forget":
            energy = account.forget(value)
            all_known = all_known and energy is not None
            gone = total_energy(gone, energy or NOTHING_SPENT) or gone
            continue
        assert isinstance(value, float)
        if what == "idle":
            now += value
        elif what == "read":
            joules += value
            now += 0.001
            account.read(counter(joules), now, ())
        else:
            account.begin(now)
            if what == "read within":
                joules += value
                now += 0.5
                account.read(counter(joules), now, ())
            now += 0.25 if what == "read within" else value
            account.end(rows or [], now)
    now += 1.0
    account.read(counter(joules), now, ())
    told = {name: account.spent(name) for name in ("a", "b", "c", "d")}
    for energy in (gone, *told.values()):
        assert energy is not None
        assert energy.prompt_j >= 0.0
        assert energy.token_j >= 0.0
    prompts = gone.prompt_j + sum(energy.prompt_j for energy in told.values() if energy is not None)
    tokens = gone.token_j + sum(energy.token_j for energy in told.values() if energy is not None)
    assert account.pending_j == pytest.approx(0.0, abs=1e-6)
    assert account.prompt_j + account.token_j + account.rest_j == pytest.approx(joules, abs=1e-6)
    assert prompts <= account.prompt_j + 1e-6
    assert tokens <= account.token_j + 1e-6
    if all_known:
        assert prompts + tokens + account.rest_j == pytest.approx(joules, abs=1e-6)
