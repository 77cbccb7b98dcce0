"""Which gradient mode a stage gets: a table of places, and laws for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.abilities import ABILITIES, BACKWARD, JVP, WEIGHTS
from edgetrain.errors import PlanError
from edgetrain.planner.mode_rules import ORDER, StageFacts
from edgetrain.planner.modes import Choice, choose_modes

ALL = frozenset(ABILITIES)
PLAIN = frozenset((WEIGHTS,))
PUSHING = frozenset((WEIGHTS, JVP))
NOW = frozenset(("vjp", "identity", "hybrid", "frozen"))

FULL = StageFacts("pc", ALL)
NPU = StageFacts("npu", PLAIN)
CONV = StageFacts("npu", PLAIN, convolutional=True)
BLOCK = StageFacts("npu", PLAIN, branches=True, streams=True)
START = StageFacts("npu", PLAIN, branches=True)
DSP = StageFacts("dsp", PUSHING)
BARE = StageFacts("old", frozenset())

TABLE = [
    # everything runs everywhere
    ([FULL, FULL, FULL], False, "vjp vjp vjp"),
    ([FULL, FULL, FULL], True, "vjp vjp vjp"),
    # one stage is plain inference
    ([NPU, FULL, FULL], False, "hybrid vjp vjp"),
    ([FULL, NPU, FULL], False, "vjp hybrid vjp"),
    ([FULL, FULL, NPU], False, "vjp vjp hybrid"),
    ([NPU, FULL], True, "hybrid vjp"),
    ([CONV, FULL], False, "hybrid vjp"),
    ([CONV, FULL], True, "frozen vjp"),
    ([BLOCK, FULL], True, "identity vjp"),
    ([BLOCK, FULL], False, "hybrid vjp"),
    ([FULL, BLOCK, FULL], True, "vjp identity vjp"),
    ([FULL, BLOCK, FULL], False, "vjp hybrid vjp"),
    # a pretrained stage in the middle returns no noise, and so nothing
    ([FULL, NPU, FULL], True, "frozen hybrid vjp"),
    ([FULL, START, FULL], True, "frozen identity vjp"),
    # an estimate needs an exact cotangent; identity is content with identity
    ([NPU, NPU, FULL], False, "frozen hybrid vjp"),
    ([START, BLOCK, FULL], True, "identity identity vjp"),
    # what cannot even take weights keeps them, and returns nothing
    ([FULL, BARE, FULL], False, "frozen frozen vjp"),
    ([BARE, FULL], False, "frozen vjp"),
    # nothing to train
    ([StageFacts("npu", PLAIN, trains=0), FULL], False, "frozen vjp"),
    ([StageFacts("pc", frozenset((BACKWARD,)), trains=0), FULL], False, "vjp vjp"),
    ([FULL, StageFacts("pc", frozenset((BACKWARD,))), FULL], False, "vjp frozen vjp"),
]


def modes(stages, pretrained=False, available=NOW):
    choices = choose_modes(stages, pretrained=pretrained, available=available)
    return " ".join(choice.mode for choice in choices)


@pytest.mark.parametrize(("stages", "pretrained", "expected"), TABLE)
def test_the_table(stages, pretrained, expected):
    assert modes(stages, pretrained) == expected


@pytest.mark.parametrize(
    ("stages", "pretrained", "expected"),
    [
        ([FULL, NPU, FULL], True, "local_vjp hybrid vjp"),
        ([NPU, NPU, FULL], False, "local hybrid vjp"),
        ([NPU, NPU, NPU], False, "local local hybrid"),
        ([CONV, FULL], True, "frozen vjp"),
    ],
)
def test_local_modes_need_nothing_from_others(stages, pretrained, expected):
    assert modes(stages, pretrained, frozenset(ORDER)) == expected


CARRIED = frozenset(("forward_gradient", "spsa", "frozen"))


@pytest.mark.parametrize(
    ("stages", "available", "expected"),
    [
        ([DSP, DSP], CARRIED, "forward_gradient forward_gradient"),
        ([NPU, DSP], CARRIED, "forward_gradient forward_gradient"),
        ([DSP, BARE], CARRIED, "frozen frozen"),
        ([BARE, DSP], CARRIED, "frozen forward_gradient"),
        ([DSP, NPU], CARRIED - {"forward_gradient"}, "spsa spsa"),
        ([StageFacts("npu", PLAIN, trains=10**6), NPU], CARRIED, "forward_gradient " * 2),
        ([DSP, DSP, FULL], CARRIED | {"vjp"}, "frozen frozen vjp"),
    ],
)
def test_noise_is_carried_on_by_stages_of_one_mode(stages, available, expected):
    assert modes(stages, available=available) == expected.strip()


def test_noise_is_carried_on_in_one_form():
    for stages, form in (([DSP, DSP], ""), ([DSP, NPU], "forward")):
        choices = choose_modes(stages, pretrained=False, available=CARRIED)
        assert [choice.form for choice in choices] == [form, form]


def reasons(stages, pretrained=False):
    choices = choose_modes(stages, pretrained=pretrained, available=NOW)
    return [choice.reason for choice in choices]


def test_reasons_say_what_stood_in_the_way():
    first, last = reasons([CONV, FULL], pretrained=True)
    assert first == (
        "npu keeps its weights: its engine runs no backward graphs, and the first layers of"
        " a pretrained convolutional net are best left as they are"
    )
    assert last == "pc runs backward graphs, so its gradients are exact"
    first, middle, _ = reasons([FULL, NPU, FULL], pretrained=True)
    assert first == (
        "pc keeps its weights: nothing comes back from stage 1, 'hybrid' on 'npu'"
    )
    assert middle == (
        "npu estimates its gradients from the exact cotangent that arrives: its engine"
        " runs no backward graphs"
    )


def asking(facts: StageFacts, mode: str) -> StageFacts:
    return StageFacts(
        facts.device,
        facts.runs,
        asked=mode,
        branches=facts.branches,
        streams=facts.streams,
        convolutional=facts.convolutional,
    )


def test_what_is_asked_for_is_done_even_where_it_is_not_wise():
    assert modes([asking(CONV, "hybrid"), FULL], pretrained=True) == "hybrid vjp"
    assert modes([asking(BLOCK, "identity"), FULL]) == "identity vjp"
    assert modes([FULL, asking(FULL, "frozen"), FULL]) == "vjp frozen vjp"


@pytest.mark.parametrize(
    ("stages", "pretrained", "words"),
    [
        ([asking(NPU, "vjp"), FULL], False, r"'vjp' of stage 0 .*'npu'.* no backward"),
        ([asking(NPU, "identity"), FULL], False, "no layer here ends a residual branch"),
        ([asking(NPU, "hybrid"), NPU, FULL], False, "estimate comes back from stage 1"),
        ([asking(FULL, "vjp"), NPU, FULL], True, "nothing comes back from stage 1"),
        ([asking(BARE, "hybrid"), FULL], False, "no weights graphs"),
        ([StageFacts("npu", ALL, "hybrid", "vjp"), FULL], False, "offers only 'hybrid'"),
    ],
)
def test_what_cannot_be_is_refused(stages, pretrained, words):
    with pytest.raises(PlanError, match=words):
        modes(stages, pretrained)


def test_a_device_that_declares_one_mode_gets_it_or_keeps_its_weights():
    declared = StageFacts("npu", ALL, offered="hybrid", convolutional=True)
    assert modes([declared, FULL], pretrained=True) == "hybrid vjp"
    assert modes([declared, declared, FULL]) == "frozen hybrid vjp"
    assert "but only an estimate comes back" in reasons([declared, declared, FULL])[0]


FACTS = st.builds(
    StageFacts,
    device=st.sampled_from(["a", "b"]),
    runs=st.frozensets(st.sampled_from(ABILITIES)),
    offered=st.sampled_from(["auto", "auto", "hybrid", "frozen", "vjp"]),
    trains=st.sampled_from([0, 10, 10**6]),
    branches=st.booleans(),
    streams=st.booleans(),
    convolutional=st.booleans(),
)


@settings(max_examples=600)
@given(
    stages=st.lists(FACTS, min_size=1, max_size=5),
    pretrained=st.booleans(),
    available=st.frozensets(st.sampled_from(ORDER)).map(lambda s: s | {"vjp", "frozen"}),
    upstream=st.booleans(),
)
def test_every_choice_can_be_carried_out(stages, pretrained, available, upstream):
    choices = choose_modes(
        stages, pretrained=pretrained, available=available, upstream=upstream
    )
    assert len(choices) == len(stages)
    arrives = "exact"
    for number in range(len(stages) - 1, -1, -1):
        facts, choice = stages[number], choices[number]
        check(facts, choice, arrives, available)
        assert choice.reason.startswith(facts.device)
        arrives = sent(facts, choice, arrives) if choice.returns or not number else ""
        later = {other.mode for other in choices[number:]}
        assert later == {choice.mode} or choice.mode not in ("forward_gradient", "spsa")
        if pretrained or not upstream:
            assert arrives != "noise" or not number


def check(facts: StageFacts, choice: Choice, arrives: str, available) -> None:
    runs, mode = facts.runs, choice.mode
    assert mode in available | {facts.offered}
    assert facts.offered in ("auto", mode) or mode == "frozen"
    assert choice.form == "forward" or JVP in runs
    if mode not in ("frozen", "vjp"):
        assert WEIGHTS in runs or not facts.trains
        assert facts.trains or facts.offered == mode
    match mode:
        case "vjp":
            assert BACKWARD in runs
            assert WEIGHTS in runs or not facts.trains
            assert arrives
        case "identity":
            assert facts.branches
            assert arrives in ("exact", "stand-in")
        case "hybrid":
            assert arrives == "exact"
        case "local_vjp":
            assert BACKWARD in runs


def sent(facts: StageFacts, choice: Choice, arrives: str) -> str:
    match choice.mode:
        case "vjp":
            return arrives
        case "frozen":
            return arrives if BACKWARD in facts.runs else ""
        case "identity":
            return "stand-in" if facts.streams else ""
        case "hybrid":
            return "noise"
    return ""


@settings(max_examples=100)
@given(st.lists(FACTS, min_size=1, max_size=4), st.booleans())
def test_devices_that_run_all_are_all_exact(stages, pretrained):
    able = [StageFacts(f.device, ALL, trains=f.trains, branches=f.branches) for f in stages]
    assert set(modes(able, pretrained).split()) == {"vjp"}


def test_heads_may_be_asked_for_everywhere():
    """The last stage's own loss is its head."""
    every = frozenset(ORDER)
    for mode in ("local_vjp", "local"):
        for stage in (asking(FULL, mode), StageFacts("pc", ALL, offered=mode)):
            assert modes([stage, stage], available=every) == f"{mode} {mode}"


def test_a_pretrained_stage_without_backward_learns_only_from_heads_that_know():
    every = frozenset(ORDER) - {"forward_gradient", "spsa"}
    for stages, without, with_them in (
        ([CONV, FULL], "frozen vjp", "local vjp"),
        ([NPU, NPU, FULL], "frozen hybrid vjp", "local hybrid vjp"),
    ):
        for shipped, expected in ((False, without), (True, with_them)):
            choices = choose_modes(
                stages, pretrained=True, available=every, shipped=shipped
            )
            assert " ".join(choice.mode for choice in choices) == expected
