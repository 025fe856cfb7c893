from src.pipeline import ScheduleSettings, epoch_order, schedule
from tests.fakes.trials import task

TASKS = [task(name) for name in "abcde"]


def names(tasks):
    return "".join(item.id for item in tasks)


def batches(**changes):
    options = {"batch_size": 2, "n_epochs": 2, "max_steps": None, "seed": 0}
    return schedule(TASKS, ScheduleSettings(**(options | changes)))


def test_every_task_comes_once_an_epoch_and_epochs_never_mix():
    plan = batches()
    assert [(batch.step, batch.epoch, len(batch.tasks)) for batch in plan] == [
        (1, 0, 2),
        (2, 0, 2),
        (3, 0, 1),
        (4, 1, 2),
        (5, 1, 2),
        (6, 1, 1),
    ]
    for epoch in (0, 1):
        assert sorted(names([item for batch in plan if batch.epoch == epoch for item in batch.tasks])) == list("abcde")


def test_max_steps_cuts_the_plan_and_changes_nothing_before():
    assert batches(max_steps=4) == batches()[:4]
    assert batches(max_steps=100) == batches()


def test_the_order_is_a_function_of_ids_seed_and_epoch_alone():
    assert epoch_order(TASKS[::-1], seed=1, epoch=2) == epoch_order(TASKS, seed=1, epoch=2)
    assert len({names(epoch_order(TASKS, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}) > 5
