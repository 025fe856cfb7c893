import numpy as np

from skyrl_tx_server.ops import (
    AdamSettings,
    CreateModel,
    DropSnapshot,
    ForwardBackward,
    LoraSpec,
    LossFn,
    Op,
    OptimStep,
    Sample,
    SamplingSettings,
    SaveSampler,
)
from skyrl_tx_server.scheduler import PREFILLS_PER_TURN, PROMPTS_PER_PREFILL, Admit, Decode, Prefill, Scheduler, Step


def sample(weights: str | None = None, num_samples: int = 1) -> Sample:
    return Sample(weights=weights, prompt=np.array([1], np.int32), settings=SamplingSettings(), num_samples=num_samples)


def optim(model_id: str) -> OptimStep:
    return OptimStep(model_id=model_id, adam=AdamSettings())


def forward(model_id: str) -> ForwardBackward:
    return ForwardBackward(model_id=model_id, data=(), loss_fn=LossFn.CROSS_ENTROPY, forward_only=True)


def queue(*ops: Op) -> Scheduler:
    scheduler = Scheduler()
    for ticket, op in enumerate(ops, start=1):
        scheduler.add(ticket, op)
    return scheduler


def run_steps(scheduler: Scheduler) -> list[int]:
    """Tickets in the order they run when every operation takes one step and nothing samples."""
    order = []
    while isinstance(turn := scheduler.next(free_slots=0, rows_decoding=0), Step):
        order.append(turn.ticket)
        scheduler.finish(turn)
    return order


def next_turn(scheduler: Scheduler, *, free_slots: int, rows_decoding: int) -> Step | Admit | Decode | None:
    """Of an executor that computes one prompt at a time."""
    turn = scheduler.next(free_slots=free_slots, rows_decoding=rows_decoding)
    if not isinstance(turn, Prefill):
        return turn
    scheduler.put_back(turn.admits[1:])
    return turn.admits[0]


def test_nothing_to_do_is_none():
    assert Scheduler().next(free_slots=4, rows_decoding=0) is None


def test_operations_of_one_model_run_in_submission_order_and_models_take_turns():
    scheduler = queue(forward("a"), optim("a"), forward("a"), forward("b"), optim("b"))
    assert run_steps(scheduler) == [1, 4, 2, 5, 3]


def test_an_unfinished_operation_keeps_its_model_but_not_the_others_waiting():
    scheduler = queue(forward("a"), optim("a"), forward("b"))
    turns = [scheduler.next(free_slots=0, rows_decoding=0) for _ in range(4)]
    assert [turn.ticket for turn in turns if isinstance(turn, Step)] == [1, 3, 1, 3]


def test_training_and_decoding_alternate_when_both_have_work():
    scheduler = queue(*[forward("a") for _ in range(3)])
    kinds = []
    for _ in range(6):
        turn = scheduler.next(free_slots=0, rows_decoding=2)
        kinds.append(type(turn))
        if isinstance(turn, Step):
            scheduler.finish(turn)
    assert kinds == [Step, Decode, Step, Decode, Step, Decode]


def test_a_forward_beside_a_long_generation_waits_at_most_one_decode_block():
    scheduler = Scheduler()
    for _ in range(5):
        assert isinstance(scheduler.next(free_slots=3, rows_decoding=1), Decode)
    scheduler.add(1, forward("a"))
    assert isinstance(scheduler.next(free_slots=3, rows_decoding=1), Step)
    scheduler.add(2, forward("b"))
    assert isinstance(scheduler.next(free_slots=3, rows_decoding=1), Decode)
    assert isinstance(scheduler.next(free_slots=3, rows_decoding=1), Step)


def test_waiting_samples_enter_in_order_and_in_parts():
    scheduler = queue(sample(num_samples=3), sample(num_samples=2))
    assert next_turn(scheduler, free_slots=2, rows_decoding=0) == Admit(ticket=1, op=scheduler._samples[0].op, first=0, count=2)
    assert isinstance(next_turn(scheduler, free_slots=0, rows_decoding=2), Decode)
    rest = next_turn(scheduler, free_slots=2, rows_decoding=0)
    assert isinstance(rest, Admit) and (rest.ticket, rest.first, rest.count) == (1, 2, 1)
    second = next_turn(scheduler, free_slots=1, rows_decoding=1)
    assert isinstance(second, Admit) and (second.ticket, second.first, second.count) == (2, 0, 1)


def test_what_may_be_computed_together_is_offered_together_and_what_is_not_taken_keeps_its_place():
    scheduler = queue(sample(num_samples=3), SaveSampler(model_id="a", weights="s"), sample("s"), sample(num_samples=2), sample())
    save = scheduler.next(free_slots=5, rows_decoding=0)
    offered = scheduler.next(free_slots=5, rows_decoding=0)
    assert isinstance(save, Step) and isinstance(offered, Prefill)
    assert [(admit.ticket, admit.first, admit.count) for admit in offered.admits] == [(1, 0, 3), (4, 0, 2)]  # 3 waits for its snapshot
    scheduler.put_back(offered.admits[1:])
    scheduler.finish(save)
    offered = scheduler.next(free_slots=2, rows_decoding=3)
    assert isinstance(offered, Prefill)
    assert [(admit.ticket, admit.first, admit.count) for admit in offered.admits] == [(4, 0, 2)]
    assert isinstance(scheduler.next(free_slots=0, rows_decoding=5), Decode)
    offered = scheduler.next(free_slots=2, rows_decoding=3)
    assert isinstance(offered, Prefill)
    assert [admit.ticket for admit in offered.admits] == [3, 5]

    scheduler = queue(*[sample() for _ in range(PROMPTS_PER_PREFILL + 1)])
    offered = scheduler.next(free_slots=100, rows_decoding=0)
    assert isinstance(offered, Prefill) and len(offered.admits) == PROMPTS_PER_PREFILL


def test_all_free_slots_fill_before_decoding_unless_training_waits():
    scheduler = queue(*[sample() for _ in range(8)])
    turns = [next_turn(scheduler, free_slots=8 - n, rows_decoding=n) for n in range(9)]
    assert [type(turn) for turn in turns] == [Admit] * 8 + [Decode]

    scheduler = queue(*[sample() for _ in range(8)], forward("a"), optim("a"))
    turns = [next_turn(scheduler, free_slots=8, rows_decoding=0)]
    scheduler.finish(turns[0])
    turns += [next_turn(scheduler, free_slots=8 - n, rows_decoding=n) for n in range(PREFILLS_PER_TURN + 2)]
    assert [type(turn) for turn in turns] == [Step] + [Admit] * PREFILLS_PER_TURN + [Decode, Step]


def test_requests_that_end_in_their_prefill_do_not_starve_training():
    scheduler = queue(*[sample() for _ in range(20)], forward("a"), optim("a"))
    first = next_turn(scheduler, free_slots=4, rows_decoding=0)
    assert isinstance(first, Step)
    scheduler.finish(first)
    turns = [next_turn(scheduler, free_slots=4, rows_decoding=0) for _ in range(PREFILLS_PER_TURN + 1)]
    assert [type(turn) for turn in turns] == [Admit] * PREFILLS_PER_TURN + [Step]
    assert isinstance(next_turn(scheduler, free_slots=4, rows_decoding=0), Admit), "nor does training starve them"


def test_requests_that_end_in_their_prefill_do_not_starve_running_samples():
    scheduler = queue(*[sample() for _ in range(20)])
    turns = [next_turn(scheduler, free_slots=3, rows_decoding=1) for _ in range(2 * PREFILLS_PER_TURN + 3)]
    assert [type(turn) for turn in turns] == [Admit] * PREFILLS_PER_TURN + [Decode] + [Admit] * PREFILLS_PER_TURN + [Decode, Admit]


def test_a_sample_waits_for_the_snapshot_still_being_saved_and_lets_others_pass():
    scheduler = queue(optim("a"), SaveSampler(model_id="a", weights="s"), sample("s"), sample("saved before"))
    first = next_turn(scheduler, free_slots=4, rows_decoding=0)
    assert isinstance(first, Step) and first.ticket == 1
    scheduler.finish(first)
    passing = next_turn(scheduler, free_slots=4, rows_decoding=0)
    assert isinstance(passing, Admit) and passing.ticket == 4
    next_turn(scheduler, free_slots=3, rows_decoding=1)
    save = next_turn(scheduler, free_slots=3, rows_decoding=1)
    assert isinstance(save, Step) and save.ticket == 2
    scheduler.finish(save)
    waited = next_turn(scheduler, free_slots=3, rows_decoding=1)
    assert isinstance(waited, Admit) and waited.ticket == 3


def test_dropping_a_snapshot_waits_for_samples_asked_for_before_it():
    scheduler = queue(sample("s"), DropSnapshot(weights="s"))
    assert next_turn(scheduler, free_slots=0, rows_decoding=0) is None
    assert isinstance(next_turn(scheduler, free_slots=1, rows_decoding=0), Admit)
    drop = next_turn(scheduler, free_slots=0, rows_decoding=1)
    assert isinstance(drop, Step) and drop.ticket == 2
    assert run_steps(queue(DropSnapshot(weights="s"), sample("s"))) == [1]
    assert run_steps(queue(sample("s"), DropSnapshot(weights="s"), DropSnapshot(weights="nobody's"))) == [3]


def test_dropping_a_snapshot_waits_for_its_save():
    save = SaveSampler(model_id="a", weights="s")
    assert run_steps(queue(optim("a"), save, DropSnapshot(weights="s"))) == [1, 2, 3]


def test_what_is_put_back_keeps_its_order():
    scheduler = queue(*[sample(num_samples=2)] * 3)

    def offers(free_slots: int) -> list[tuple[int, int, int]]:
        offered = scheduler.next(free_slots=free_slots, rows_decoding=0)
        assert isinstance(offered, Prefill)
        scheduler.put_back(offered.admits[-1:] if free_slots == 3 else offered.admits)
        return [(admit.ticket, admit.first, admit.count) for admit in offered.admits]

    for _ in range(2):
        assert offers(5) == [(1, 0, 2), (2, 0, 2), (3, 0, 1)]
    assert offers(3) == [(1, 0, 2), (2, 0, 1)]
    assert offers(9) == [(2, 0, 2), (3, 0, 2)]
    first = scheduler.next(free_slots=1, rows_decoding=0)
    assert isinstance(first, Prefill)
    assert [offers(9) for _ in range(2)] == [[(2, 1, 1), (3, 0, 2)]] * 2, "of a request that has begun the rest"


def test_a_held_sample_keeps_its_place_until_a_row_finishes():
    scheduler = queue(sample("s"), sample())
    admit = next_turn(scheduler, free_slots=2, rows_decoding=1)
    assert isinstance(admit, Admit)
    scheduler.hold([admit])
    assert not scheduler.interrupts(free_slots=2)
    assert isinstance(next_turn(scheduler, free_slots=2, rows_decoding=1), Decode)
    scheduler.row_finished()
    assert scheduler.interrupts(free_slots=2) and not scheduler.interrupts(free_slots=0)
    assert next_turn(scheduler, free_slots=2, rows_decoding=1) == admit


def test_between_two_pieces_of_a_long_prompt_running_samples_get_a_decode_block():
    scheduler = queue(sample(), sample())
    for _ in range(3):
        admit = next_turn(scheduler, free_slots=2, rows_decoding=1)
        assert isinstance(admit, Admit) and admit.ticket == 1
        scheduler.resume(admit)
        assert isinstance(next_turn(scheduler, free_slots=2, rows_decoding=1), Decode)
    admit = next_turn(scheduler, free_slots=2, rows_decoding=0)
    assert isinstance(admit, Admit) and admit.ticket == 1
    scheduler.resume(admit)
    last = next_turn(scheduler, free_slots=2, rows_decoding=0)  # nobody to wait for
    assert isinstance(last, Admit) and last.ticket == 1


def test_a_dropped_request_does_not_enter():
    scheduler = queue(sample(), sample(num_samples=3), sample(), CreateModel(model_id="a", lora=LoraSpec(rank=1)))
    scheduler.drop_sample(2)
    assert isinstance(next_turn(scheduler, free_slots=4, rows_decoding=0), Step)
    offered = scheduler.next(free_slots=4, rows_decoding=0)
    assert isinstance(offered, Prefill) and [admit.ticket for admit in offered.admits] == [1, 3]
