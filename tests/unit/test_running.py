"""The jobs that a worker runs, and the seats that they take."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from tests.unit.engines import ScriptedEngine
from tests.unit.test_publisher import Server, make_adopted
from worker.publisher import Publisher
from worker.run import Run
from worker.running import SUSPECTS, Running


def make_run(strikes: int = 0, **changes: Any) -> Run:
    adopted = replace(make_adopted(**changes), strikes=strikes)
    return Run(adopted, ScriptedEngine(), Publisher(Server()))


async def test_a_job_takes_as_many_seats_as_it_has_sequences() -> None:
    running = Running()
    runs = [make_run(sequences=n) for n in (0, 1, 3)]
    for run in runs:
        running.add(run)
    assert running.sequences == 5
    running.free(runs[2])
    running.free(runs[2])
    assert running.sequences == 2
    assert len(running.jobs) == 3
    for run in runs:
        running.remove(run)
        running.remove(run)
    assert (running.sequences, running.jobs) == (0, {})


async def test_an_attempt_that_is_over_does_not_remove_the_next_one() -> None:
    running = Running()
    first = make_run()
    second = Run(replace(first.adopted, owner="o2"), ScriptedEngine(), Publisher(Server()))
    running.add(first)
    running.add(second)
    running.remove(first)
    assert running.jobs == {first.adopted.job.id: second}
    assert running.sequences == 1


async def test_a_suspect_is_one_until_it_has_got_further() -> None:
    running = Running()
    run = make_run(strikes=1)
    running.add(run)
    assert running.suspect
    await run.outbox.put(b"x")
    run.outbox.seal()
    assert not running.suspect
    other = make_run(strikes=1)
    running.add(other)
    assert running.suspect
    running.free(other)
    assert not running.suspect


async def test_suspects_of_one_strike_run_together_and_others_alone() -> None:
    running = Running()
    running.add(make_run())
    first = make_run(strikes=1)
    running.add(first)
    assert running.takes_suspect()
    assert not running.takes_suspect(2)
    for _ in range(SUSPECTS - 1):
        assert running.takes_suspect()
        running.add(make_run(strikes=1))
    assert not running.takes_suspect()
    await first.outbox.put(b"x")
    first.outbox.seal()
    assert running.takes_suspect()


async def test_beside_a_suspect_of_two_strikes_runs_no_other() -> None:
    running = Running()
    running.add(make_run(strikes=2))
    assert not running.takes_suspect()


async def test_waiting_for_the_last_job() -> None:
    running = Running()
    runs = [make_run(), make_run()]
    for run in runs:
        running.add(run)
    drained = asyncio.create_task(running.drained())
    await asyncio.sleep(0)
    running.remove(runs[0])
    for _ in range(3):
        await asyncio.sleep(0)
    assert not drained.done()
    running.remove(runs[1])
    await asyncio.wait_for(drained, 0.5)


async def test_a_change_is_noticed_and_waiting_for_one_ends() -> None:
    running = Running()
    changed = asyncio.create_task(running.changed(timeout_s=5))
    await asyncio.sleep(0)
    running.add(make_run())
    await asyncio.wait_for(changed, 0.5)
    await asyncio.wait_for(running.changed(timeout_s=0.01), 0.5)
