import chz
import pytest

from scripts.bench.signal_sampling import simulated
from src.core.trajectory import TrajectoryGroup
from src.learning.curriculum import DECAY, Curriculum, curriculum_metrics, from_records, to_record
from src.learning.options import CurriculumOptions
from tests.fakes.trials import failure, task, trajectory

SIGNAL = CurriculumOptions(task_sampling="thompson", exploration_floor=0.25, seed=0)
TASKS = [task(name) for name in "abcdefgh"]


def group(name, *rewards):
    return TrajectoryGroup(
        task=task(name),
        trajectories=[trajectory(name, reward) for reward in rewards],
        failures=[] if rewards else [failure()],
    )


def test_evidence_accumulates_and_decays():
    state = Curriculum().after([group("a", 1, 0, 0, 0), group("a", 1, 1, 0.5, 0)])
    assert (state.posterior(task("a")).solved, state.posterior(task("a")).failed) == (
        DECAY * 1 + 2,
        DECAY * 3 + 2,
    )
    assert state.posterior(task("b")).mean == 0.5


def test_an_ungraded_group_counts_as_rolled_out_without_evidence():
    before = Curriculum().after([group("a", 1, 0)])
    after = before.after([group("a")])
    assert (after.posterior(task("a")).solved, after.posterior(task("a")).failed) == (
        before.posterior(task("a")).solved,
        before.posterior(task("a")).failed,
    )
    assert after.posterior(task("a")).last_rolled_out == 1


def test_choice_prefers_rates_near_one_half_and_explores():
    state = Curriculum()
    for _ in range(8):
        state = state.after(
            [group(name, *([0] * 8)) for name in "abcde"]
            + [group(name, *([1] * 4 + [0] * 4)) for name in "fgh"]
        )
    chosen = [task.id for task in state.choose(TASKS, 4, SIGNAL, step=1, refill_index=0)]
    assert chosen[0] == "a" and set(chosen[1:]) == {"f", "g", "h"}


def test_choice_depends_on_state_seed_and_step_only():
    state = Curriculum().after([group("a", 1, 0), group("b", 0, 0)])

    def chosen(state=state, tasks=TASKS, **changes):
        return [
            task.id for task in state.choose(tasks, 4, SIGNAL, **({"step": 3, "refill_index": 0} | changes))
        ]

    assert chosen() == chosen(from_records([to_record(state, since=0)])) == chosen(tasks=TASKS[::-1])
    assert len({tuple(chosen(step=step)) for step in range(10)}) > 1
    assert chosen() != chosen(refill_index=1)
    assert len(set(chosen())) == 4 and len(state.choose(TASKS, 99, SIGNAL, step=1, refill_index=0)) == 8


def test_a_floor_below_one_task_explores_at_random():
    half_task = chz.replace(SIGNAL, exploration_floor=0.125)  # 0.125 of 4 chosen tasks is half a task
    state = Curriculum().after(
        [group("a", *([0] * 8)), *(group(name, *([1] * 4 + [0] * 4)) for name in "bcdefgh")]
    )
    for name in "bcdefgh" * 20:
        state = state.after([group(name, 1, 0)])
    explored = sum(
        state.choose(TASKS, 4, half_task, step=step, refill_index=0)[0].id == "a" for step in range(200)
    )
    assert 70 < explored < 130
    assert len(
        {Curriculum().choose(TASKS, 4, SIGNAL, step=step, refill_index=0)[0].id for step in range(40)}
    ) == len(TASKS)


def test_the_state_is_restored_from_the_records_of_all_steps():
    first = Curriculum().after([group("a", 1, 0, 0), group("b", 1)])
    second = first.after([group("a", 1)])
    changes = [to_record(first, since=0), {}, to_record(second, since=first.num_groups)]
    assert [set(change.get("evidence", ())) for change in changes] == [{"a", "b"}, set(), {"a"}]
    assert from_records(changes) == from_records([to_record(second, since=0)]) == second
    assert from_records([]) == from_records([{}]) == Curriculum()


@pytest.mark.parametrize("seed", range(3))
def test_signal_sampling_doubles_the_signal_of_a_hard_pool(seed):
    size = {"num_tasks": 100, "batch_size": 8, "group_size": 8, "num_steps": 150, "seed": seed}
    uniform = simulated("uniform", floor=0.1, **size)
    signal = simulated("thompson", floor=0.1, **size)
    assert signal.informative >= 2 * uniform.informative
    assert signal.num_visited == uniform.num_visited == 100


def test_curriculum_metrics_count_tasks_by_difficulty():
    state = Curriculum().after([group("a", *([0] * 16)), group("b", *([1] * 16)), group("c", 1, 0)])
    assert curriculum_metrics(state, TASKS, SIGNAL) == {
        **{
            "curriculum/tasks_unplayed": 5,
            "curriculum/tasks_hard": 1,
            "curriculum/tasks_mid": 1,
            "curriculum/tasks_easy": 1,
        }
    }
